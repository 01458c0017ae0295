"""FedTTA: a model for all and a learned loss that adapts it to unlabeled data in one step.

Ye et al., "UPFL: Unsupervised Personalized Federated Learning towards New Clients", SDM 2024: the
learned loss of ARM (Zhang et al. 2021) trained by FedAvg.

    m(theta; X) = || g(f(x; theta); phi) for x in X ||_2         g: C - 32 - 32 - 32 - 1, ReLU
    theta'      = theta - inner_lr * gradient of m(theta; X) by theta
    L           = mean over labeled (x, y) of l(y, f(x; theta'))

The gradient of L by (theta, phi) goes through the inner step, so it is of second order; the inner
step and L use the same batch.  A new client takes the inner step on its unlabeled data, averaged
over batches; m grows with the square root of a batch, so these have the size of training.  Beware:
they are cut in the order of X, so give it in a random one, as evaluation does.

Sent per client and round: theta and phi down and their updates up, 4 (d + d_g) bytes each, d_g =
2,497 for 10 classes and 4,161 for 62.  Only labeled clients train.

Departures: theta and phi share the client's optimizer, where the source has one for each, a
momentum for phi, and learning rates that fall; no weight decay in the inner step; gradients are
clipped together (`client.clip`); the server takes the plain mean over clients, not one by points.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import grad

from flowdup.methods.base import Batch, Method, mean_loss, sum_gradients
from flowdup.methods.context import MethodContext
from flowdup.models.network import Network, Weights
from flowdup.params import Params, prefixed, strip_prefix
from flowdup.random import Stream
from flowdup.settings import check_range

_TINY = 1e-12  # keeps the norm's derivative finite at 0


@dataclass(frozen=True)
class FedTTAConfig:
    """Settings of `fedtta`."""

    inner_lr: float = 0.01  # the rate of the step that adapts a model to unlabeled data
    batch_size: int = 50  # of the batches of a new client; must be client.batch_size

    def __post_init__(self) -> None:
        check_range("method.inner_lr", self.inner_lr, 0)
        check_range("method.batch_size", self.batch_size, 1)


class FedTTA(Method):
    """The model and the learned loss in psi; see the file's docstring."""

    def __init__(self, config: FedTTAConfig, context: MethodContext) -> None:
        self.config, self.batch_size = config, config.batch_size
        self.f, self.init_model = context.f, context.init_model
        self.g = Network.build(_adaptation, (context.spec.classes,), 1, lambda logits: logits)

    def init(self, stream: Stream) -> Params:
        """phi starts as in the source, within 1 / sqrt(fan_in): He's bound, sqrt(6) times that in
        each of four layers, makes the first inner steps 36 times as long.
        """
        theta, phi = self.init_model(stream.child("theta")), self.g.init(stream.child("phi"))
        return prefixed("theta.", theta) | prefixed(
            "phi.", {n: w / math.sqrt(6) for n, w in phi.items()}
        )

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        theta, phi = strip_prefix(params, "theta."), strip_prefix(params, "phi.")
        gradient = grad(self.learned_loss)(theta, phi, batch.x, batch.present)
        return mean_loss(self.f(self._step(theta, gradient), batch.x), batch)

    def global_model(self, params: Params) -> Weights:
        return strip_prefix(params, "theta.")

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        theta, phi = strip_prefix(params, "theta."), strip_prefix(params, "phi.")

        def loss(theta: Weights, x: Tensor, present: Tensor) -> Tensor:
            return self.learned_loss(theta, phi, x, present)

        gradient = sum_gradients(loss, theta, x, present, self.config.batch_size)
        batches = torch.stack([p.any() for p in torch.split(present, self.config.batch_size)]).sum()
        return self._step(theta, {n: g / batches.clamp(min=1) for n, g in gradient.items()})

    def learned_loss(self, theta: Weights, phi: Weights, x: Tensor, present: Tensor) -> Tensor:
        """The loss of unlabeled points that a client takes its step on."""
        out = self.g(phi, self.f(theta, x))[:, 0]  # [n]
        return ((out * present).square().sum() + _TINY).sqrt()

    def _step(self, theta: Weights, gradient: Weights) -> Weights:
        return {n: w - self.config.inner_lr * gradient[n] for n, w in theta.items()}


def _adaptation(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Three hidden layers of 32 on the logits."""
    sizes = (shape[0], 32, 32, 32)
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], outputs))
