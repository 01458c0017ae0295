"""SGD and Adam as pure functions, for clients and for the server.

An optimiser's state is a dict of tensors: what it remembers of each parameter, `momentum/NAME`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowdup.errors import ConfigError
from flowdup.params import Params, pack, prefixed, unpack
from flowdup.settings import check_range

State = dict[str, Tensor]
MOMENTS = {"sgd": ("momentum",), "adam": ("mean", "square")}  # remembered of each parameter


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of an optimiser, `client.optimizer` or `server.optimizer`."""

    name: str = "sgd"  # sgd or adam
    lr: float = 0.03  # the learning rate
    momentum: float = 0.0  # sgd: the share of the last step that is kept
    beta1: float = 0.9  # adam: the share of the mean gradient that is kept
    beta2: float = 0.99  # adam: the share of the mean squared gradient that is kept
    eps: float = 1e-6  # adam: added to the root of the mean squared gradient
    weight_decay: float = 0.0  # times the weights, added to the gradient


class Optimizer:
    """`init` makes the state, `step` returns new parameters and a new state."""

    def __init__(self, config: OptimizerConfig) -> None:
        if config.name not in ("sgd", "adam"):
            raise ConfigError(f"unknown optimizer '{config.name}': use sgd or adam")
        if not (config.lr > 0 and config.eps > 0):
            raise ConfigError(
                f"an optimizer's lr and eps must be positive, not {config.lr} and {config.eps}"
            )
        for name in ("momentum", "beta1", "beta2", "weight_decay"):
            check_range(f"optimizer.{name}", getattr(config, name), 0, 0.999999)
        self.config = config

    @property
    def plain(self) -> bool:
        """Whether a step only adds a multiple of the gradient."""
        c = self.config
        return c.name == "sgd" and not c.momentum and not c.weight_decay

    def init(self, params: Params) -> State:
        """The optimiser's state before the first step: moments of every parameter, all zero."""
        state = {
            f"{kind}/{n}": torch.zeros_like(p)
            for kind in self._moments()
            for n, p in params.items()
        }
        if self.config.name == "adam":
            state["steps"] = next(iter(params.values())).new_zeros(())
        return state

    def step(
        self, params: Params, grads: Params, state: State, rate: float = 1.0
    ) -> tuple[Params, State]:
        """One step at `rate` times the learning rate."""
        lr = self.config.lr * rate
        decay = self.config.weight_decay
        if decay:
            grads = {n: g + decay * params[n] for n, g in grads.items()}
        return (self._adam if self.config.name == "adam" else self._sgd)(params, grads, state, lr)

    def step_along(
        self, params: Params, delta: Params, state: State, rate: float = 1.0
    ) -> tuple[Params, State]:
        """`step` with the gradient -delta, on all parameters as one vector: few operations, however
        many parameters there are.  What it returns are views of vectors.
        """
        moments = {
            f"{kind}/": pack({n: state[f"{kind}/{n}"] for n in params}) for kind in self._moments()
        }
        counters = {n: s for n, s in state.items() if "/" not in n}
        gradient = -pack({n: delta[n] for n in params})
        new, after = self.step({"": pack(params)}, {"": gradient}, moments | counters, rate)
        parts = [
            prefixed(n, unpack(v, params)) if n.endswith("/") else {n: v} for n, v in after.items()
        ]
        return unpack(new[""], params), {n: v for part in parts for n, v in part.items()}

    def names(self, params: Iterable[str]) -> set[str]:
        """The names in the state for parameters of these names."""
        moments = {f"{kind}/{n}" for kind in self._moments() for n in params}
        return moments | ({"steps"} if self.config.name == "adam" else set())

    def _moments(self) -> tuple[str, ...]:
        if self.config.name == "sgd" and not self.config.momentum:
            return ()
        return MOMENTS[self.config.name]

    def _sgd(self, params: Params, grads: Params, state: State, lr: float) -> tuple[Params, State]:
        """m <- mu m + g;  p <- p - lr m."""
        mu = self.config.momentum
        if mu:
            grads = {n: mu * state[f"momentum/{n}"] + g for n, g in grads.items()}
            state = {f"momentum/{n}": g for n, g in grads.items()}
        return {n: p - lr * grads[n] for n, p in params.items()}, state

    def _adam(self, params: Params, grads: Params, state: State, lr: float) -> tuple[Params, State]:
        """Kingma and Ba 2015: p <- p - lr m^ / (sqrt(s^) + eps), both moments bias-corrected."""
        c = self.config
        steps = state["steps"] + 1
        fix_mean, fix_square = 1 - c.beta1**steps, 1 - c.beta2**steps
        new: State = {"steps": steps}
        out: Params = {}
        for n, p in params.items():
            mean = c.beta1 * state[f"mean/{n}"] + (1 - c.beta1) * grads[n]
            square = c.beta2 * state[f"square/{n}"] + (1 - c.beta2) * grads[n].square()
            out[n] = p - lr * (mean / fix_mean) / ((square / fix_square).sqrt() + c.eps)
            new[f"mean/{n}"], new[f"square/{n}"] = mean, square
        return out, {n: new[n] for n in state}  # in the same order
