"""An `nn.Module` as a pure function of its weights, which start from a named stream."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from flowdup.errors import ConfigError
from flowdup.random import Stream

Weights = dict[str, Tensor]
Factory = Callable[[tuple[int, ...], int], nn.Module]  # (shape of one input, outputs) -> module


@dataclass(frozen=True)
class Network:
    """`network(weights, x)`: x [n, *shape] as stored -> [n, outputs].

    `read` turns stored inputs (uint8 images, say) into the floats that the module expects.
    `deviations` holds, for every parameter, the standard deviation of its initial draw, which is
    also its row scale in an expansion (`subspace.py`).
    """

    module: nn.Module
    read: Callable[[Tensor], Tensor]
    shapes: dict[str, tuple[int, ...]]
    deviations: dict[str, float]
    constants: dict[str, float]

    @classmethod
    def build(
        cls,
        factory: Factory,
        shape: tuple[int, ...],
        outputs: int,
        read: Callable[[Tensor], Tensor],
    ) -> "Network":
        """Read a module's parameters; none of its random values survive.

        A parameter that the module starts as a constant (a norm's weight of 1, a layer scale of
        1e-6) keeps that constant.  Any other of two or more dimensions is drawn anew (He et al.
        2015, uniform), any other of one dimension starts at 0.  What is not drawn has the
        deviation of the drawn parameter before it: a bias or a norm that of its layer.
        """
        with torch.random.fork_rng(devices=[]):
            module = factory(shape, outputs).eval()
        _refuse_state(module)
        parameters = dict(module.named_parameters())
        constants = {n: c for n, p in parameters.items() if (c := _constant(p)) is not None}
        drawn = [n for n in parameters if n not in constants]
        if not drawn:
            raise ConfigError("the model has no weight to train: give it at least one linear layer")
        deviations, last = {}, drawn[0]
        for name in parameters:
            last = name if name not in constants else last
            fan_in = math.prod(parameters[last].shape[1:])
            deviations[name] = math.sqrt(2.0 / fan_in)
        module.requires_grad_(False)
        shapes = {n: tuple(p.shape) for n, p in parameters.items()}
        return cls(module, read, shapes, deviations, constants)

    @property
    def size(self) -> int:
        """d, the number of weights."""
        return sum(map(math.prod, self.shapes.values()))

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        out: Tensor = functional_call(self.module, weights, (self.read(x),))
        return out

    def init(self, stream: Stream) -> Weights:
        """theta_0: U(-b, b) with b = sqrt(6 / fan_in) for what is drawn, each from its own stream.

        One float32 product per weight, so the bits are the same everywhere.
        """
        weights = {}
        for name, shape in self.shapes.items():
            if name in self.constants:
                weights[name] = torch.full(shape, self.constants[name])
            else:
                bound = np.float32(math.sqrt(6.0 / math.prod(shape[1:])))
                draw = stream.child(name).uniform(math.prod(shape)) * bound
                weights[name] = torch.from_numpy(draw).reshape(shape)
        return weights


def _constant(parameter: Tensor) -> float | None:
    """The value that every entry starts with, or None for a parameter that is to be drawn."""
    parameter = parameter.detach()
    first = float(parameter.reshape(-1)[0]) if parameter.numel() else 0.0
    told = parameter.numel() > 1 or first in (0.0, 1.0)  # one random number looks constant too
    if told and bool((parameter == first).all()):
        return first
    return 0.0 if parameter.ndim < 2 else None


def _refuse_state(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise ConfigError(
                f"the model's layer '{name}' keeps running statistics, which are neither averaged "
                "nor personalised: use nn.GroupNorm instead"
            )
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            warnings.warn(f"dropout in layer '{name}' is off in training", stacklevel=3)
