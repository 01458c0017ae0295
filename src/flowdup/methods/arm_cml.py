"""ARM-CML: one model for all that also reads a learned summary of a client's unlabeled points.

Zhang, Marklund, Dhawan, Gupta, Levine, Finn, "Adaptive Risk Minimization: Learning to Adapt to
Domain Shift", NeurIPS 2021: contextual meta-learning, trained by FedAvg.

    c = mean over x in X of g(x; phi)           a map of x's height and width, `channels` deep
    L = mean over labeled (x, y) of l(y, f([x, c]; theta))

f is the model with as many input channels more, to which c is joined.  c is one constant of a
client, so the client's own model is f with c among its weights (`models/context.py`).  g has three
layers with ReLU between, `hidden` wide: convolutions with windows of `kernel` that keep the size,
or, on inputs without height and width, linear layers.  X is the batch that L is taken on.

Sent per client and round: theta and phi down and their updates up, 4 bytes for each of their
numbers.  Only labeled clients train.

Departures: g has no batch normalisation, whose statistics would mix clients; f is the federation's
model, where the source takes a network of its own, smaller for this method than for others; the
server takes the mean of updates, where the source goes through batches of several domains at once.
The source has 12, 1 and 3 channels on MNIST, FEMNIST and CIFAR-10.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from flowdup.errors import ConfigError
from flowdup.methods.base import Batch, Method, mean_loss
from flowdup.methods.context import MethodContext
from flowdup.models import context_name
from flowdup.models.network import Weights
from flowdup.params import Params, prefixed, strip_prefix
from flowdup.random import Stream
from flowdup.settings import check_range

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class ARMCMLConfig:
    """Settings of `arm-cml`."""

    channels: int = 12  # of the summary of a client that f reads beside its inputs
    hidden: int = 64  # the width of g, which makes the summary
    kernel: int = 5  # the side of g's windows, odd
    chunk: int = 2048  # points that pass through g at once

    def __post_init__(self) -> None:
        check_range("method.channels", self.channels, 1, 9999)
        check_range("method.hidden", self.hidden, 1, 2**16)
        check_range("method.kernel", self.kernel, 1, 99)
        check_range("method.chunk", self.chunk, 1)
        if self.kernel % 2 == 0:
            raise ConfigError(f"setting 'method.kernel' must be odd, not {self.kernel}")


class ARMCML(Method):
    """The model and g, which makes the summary, in psi; see the file's docstring."""

    has_embedding = True

    def __init__(self, config: ARMCMLConfig, context: MethodContext) -> None:
        if context.start:
            raise ConfigError(
                "arm-cml cannot begin from a stage before, whose model has fewer input channels: "
                "make it the first stage"
            )
        self.config = config
        self.f = context.network(context_name(context.model, config.channels), context.spec.classes)
        self.g = context.own_network(self._context_network, config.channels)

    def init(self, stream: Stream) -> Params:
        theta, phi = self.f.init(stream.child("theta")), self.g.init(stream.child("phi"))
        del theta["context"]
        return prefixed("theta.", theta) | prefixed("phi.", phi)

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        weights = self.personalize(params, batch.x, batch.present)
        return mean_loss(self.f(weights, batch.x), batch)

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return {"context": self._context(params, x, present)} | strip_prefix(params, "theta.")

    def embedding(self, params: Params, x: Tensor, present: Tensor) -> Tensor:
        return self._context(params, x, present).flatten()

    def _context(self, params: Params, x: Tensor, present: Tensor) -> Tensor:
        phi = strip_prefix(params, "phi.")
        chunks = zip(*(torch.split(t, self.config.chunk) for t in (x, present)), strict=True)
        sums = [torch.tensordot(here, self.g(phi, rows), 1) for rows, here in chunks]
        return torch.stack(sums).sum(0) / present.sum().clamp(min=1)  # [channels, ...]

    def _context_network(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        if len(shape) > 4:
            raise ConfigError(
                f"method 'arm-cml' reads inputs of one to four dimensions, not of shape {shape}: "
                "choose another method"
            )
        kernel, sizes = self.config.kernel, (shape[0], *2 * (self.config.hidden,), outputs)
        layers: list[nn.Module] = []
        for a, b in pairwise(sizes):
            if len(shape) == 1:
                layers += [nn.Linear(a, b), nn.ReLU()]
            else:
                convolution = _CONVOLUTIONS[len(shape) - 2]
                layers += [convolution(a, b, kernel, padding=kernel // 2), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
