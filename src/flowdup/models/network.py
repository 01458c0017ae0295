"""An `nn.Module` as a pure function of its weights, which start from a named stream."""

import copy
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from flowdup.errors import ConfigError
from flowdup.models.isolated_random import IsolatedRandom
from flowdup.models.kinds import BATCH_NORMS, DROPOUTS
from flowdup.random import Stream

Weights = dict[str, Tensor]
Factory = Callable[[tuple[int, ...], int], nn.Module]  # (shape of one input, outputs) -> module
Exchange = Callable[[nn.Module], nn.Module]  # changes a module's layers, in place

_exchange: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


@contextmanager
def replaced_layers(exchange: Exchange) -> Iterator[None]:
    """Networks that are called inside run on copies of their modules that `exchange` has changed.

    For this thread alone.  Give the same function each time: a copy is kept for every one.
    """
    token = _exchange.set(exchange)
    try:
        yield
    finally:
        _exchange.reset(token)


class _Copies(threading.local):
    """This thread's copies of a module, by how their layers were exchanged.

    A call puts the weights into a copy and takes them out again.  Copies have the module's own
    parameters and buffers, which nobody writes.
    """

    def __init__(self) -> None:
        self.modules: dict[Exchange | None, nn.Module] = {}

    def of(self, module: nn.Module) -> nn.Module:
        exchange = _exchange.get()
        if exchange not in self.modules:
            shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
            made = _trainable_cells(copy.deepcopy(module, shared))
            self.modules[exchange] = exchange(made) if exchange else made
        return self.modules[exchange]


@dataclass(frozen=True)
class Network:
    """`network(weights, x)`: x [n, *shape] as stored -> [n, outputs].

    `module` has the layers of its definition; calls run on copies of it, so it never changes.
    `read` turns stored inputs (uint8 images, say) into the floats that the module expects.
    `deviations` holds, for every parameter, the standard deviation of its initial draw, which is
    also its row scale in an expansion (`subspace.py`).
    """

    module: nn.Module
    inputs: tuple[int, ...]  # the shape of one
    read: Callable[[Tensor], Tensor]
    shapes: dict[str, tuple[int, ...]]
    deviations: dict[str, float]
    constants: dict[str, Tensor]  # what the definition fixes: a norm's weight of 1, a scale of 1e-6
    compute: torch.dtype | None = None  # what the module computes in; None: as its weights are
    copies: _Copies = field(default_factory=_Copies)
    name: str = ""  # in the table of models; empty: a method's own
    init_scale: float = 1.0  # of what `init` draws

    @classmethod
    def build(
        cls,
        factory: Factory,
        shape: tuple[int, ...],
        outputs: int,
        read: Callable[[Tensor], Tensor],
    ) -> "Network":
        """Read a copy of a module; none of its random values survive.

        The module is made twice, with different random numbers.  What comes out equal belongs to
        its definition and stays.  Of what differs, a parameter of two or more dimensions is drawn
        anew (He et al. 2015, uniform) and any other starts at 0.  A parameter of one dimension has
        the deviation of the matrix before it: a bias or a norm that of its layer.
        """
        made, other = (_make(factory, shape, outputs, seed) for seed in (0, 1))
        module = copy.deepcopy(made)  # the factory may keep what it made
        _refuse_state(module, other)
        _announce_dropout(module.eval())
        parameters, others = (dict(m.named_parameters()) for m in (module, other))
        matrices = [n for n, p in parameters.items() if p.ndim > 1]
        if not matrices:
            raise ConfigError("the model has no matrix to train: give it at least one linear layer")
        constants, deviations, last = {}, {}, matrices[0]
        for name, parameter in parameters.items():
            last = name if parameter.ndim > 1 else last
            deviations[name] = math.sqrt(2.0 / math.prod(parameters[last].shape[1:]))
            if torch.equal(parameter, others[name]):
                constants[name] = parameter.detach().float().clone()
            elif parameter.ndim < 2:
                constants[name] = torch.zeros(parameter.shape, dtype=torch.float32)
        module.requires_grad_(False)
        shapes = {n: tuple(p.shape) for n, p in parameters.items()}
        return cls(module, shape, read, shapes, deviations, constants)

    @property
    def size(self) -> int:
        """d, the number of weights."""
        return sum(map(math.prod, self.shapes.values()))

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        x, dtype = self.read(x), next(iter(weights.values())).dtype
        if self.compute:
            x, weights = x.to(self.compute), {n: w.to(self.compute) for n, w in weights.items()}
        out: Tensor = functional_call(self.copies.of(self.module), weights, (x,))
        return out.to(dtype)

    def init(self, stream: Stream) -> Weights:
        """theta_0: U(-b, b) with b = init_scale sqrt(6 / fan_in) for what is drawn, each from its
        own stream.

        One float32 product per weight, so the bits are the same everywhere.
        """
        weights = {}
        for name, shape in self.shapes.items():
            if name in self.constants:
                weights[name] = self.constants[name].clone()
            else:
                draw = stream.child(name).uniform(math.prod(shape)) * np.float32(self.bound(name))
                weights[name] = torch.from_numpy(draw).reshape(shape)
        return weights

    def bound(self, name: str) -> float:
        """b of a parameter that is drawn, a float32."""
        fan_in = math.prod(self.shapes[name][1:])
        return float(np.float32(self.init_scale * math.sqrt(6.0 / fan_in)))


def keeps_statistics(part: nn.Module) -> bool:
    """Whether a layer has running statistics of batches."""
    return bool(getattr(part, "track_running_stats", False))


def is_frozen(part: nn.Module) -> bool:
    """Whether a layer reads its running statistics and never changes them."""
    return keeps_statistics(part) and not part.training


def _announce_dropout(module: nn.Module) -> None:
    """Once per model: a client's steps are functions of its weights and its batch alone."""
    chances = {n: _dropout(part) for n, part in module.named_modules()}
    if names := [f"'{n}'" for n, chance in chances.items() if chance > 0]:
        warnings.warn(
            f"dropout is off in federated training (layer {', '.join(names)}); a personal model "
            "in train mode has it on",
            stacklevel=4,
        )


def _dropout(part: nn.Module) -> float:
    """The chance that a layer drops a number."""
    if isinstance(part, DROPOUTS):
        return part.p
    return part.dropout if isinstance(part, nn.RNNBase | nn.MultiheadAttention) else 0.0


def _trainable_cells(module: nn.Module) -> nn.Module:
    """The module itself, its recurrent layers in train mode without dropout: they compute the same,
    and cuDNN has gradients of them in this mode only.
    """
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.dropout = 0.0
            part.train()
    return module


def _make(factory: Factory, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    with IsolatedRandom(seed):
        return factory(shape, outputs)


def _refuse_state(module: nn.Module, other: nn.Module) -> None:
    """What is neither averaged nor personalised, nor the same everywhere, cannot be in a model.

    Running statistics of a layer in eval mode are constants of the definition, as any buffer is.
    """
    for name, part in module.named_modules():
        batch = isinstance(part, BATCH_NORMS)  # also mixes padding in
        if (batch or keeps_statistics(part)) and not is_frozen(part):
            raise ConfigError(
                f"the model's layer '{name}' takes statistics of batches, which are neither "
                "averaged nor personalised: use nn.GroupNorm instead or, to keep those of a "
                "pretrained model as they are, call .eval() on it in the factory"
            )
    others = dict(other.named_buffers())
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, others[name]):
            raise ConfigError(
                f"the model's buffer '{name}' is random, so it would differ between machines: make "
                "it a parameter or a constant"
            )
