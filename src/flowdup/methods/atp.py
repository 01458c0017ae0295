"""ATP: the FedAvg model after one entropy step, with a learned rate for each of its tensors.

Bao, Wei, Wang, He, "Adaptive Test-Time Personalization for Federated Learning", NeurIPS 2023.

    g       = gradient by theta of the mean over x in X of the entropy of softmax f(x; theta)
    theta'_i = theta_i - a_i g_i                            for every tensor i of theta
    L(a)    = mean over labeled (x, y) of l(y, f(x; theta'))

so that the gradient by a_i is -<gradient of L by theta'_i, g_i>, exact without second derivatives.
The source's step a_i += lr <., g_i> / sqrt(n_i), with n_i the number of weights in i, is a plain
gradient step on rate_i where a_i = rate_i / n_i^(1/4), as rates are kept here.  They start at 0.  A
new client takes the step on all of its unlabeled data.

In the source theta is a trained model of FedAvg that stays as it is: `train_theta = false` from
such a start.  By default both are learned at once: FedAvg's loss of theta is added to L, and in L
theta and g are those that the round began with, so that without `client.clip` theta is exactly
FedAvg's.  X is the batch that L is taken on.

Sent per client and round: theta and one rate per tensor down and their updates up, 4 (d + tensors)
bytes each.  (A client that keeps a theta that stays as it is could be sent the rates alone.)  Only
labeled clients train.

Departures: no statistics of batch normalisation adapt, since models here keep none; the source
learns rates on points of its clients that theta was not trained on, here it is the same points; the
server takes the plain mean over clients; a new client's X is its whole set, not one batch of a
stream.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad

from flowdup.methods.base import Batch, Method, mean_loss, sum_entropy, sum_gradients
from flowdup.methods.context import MethodContext
from flowdup.models.network import Weights
from flowdup.params import Params, prefixed, strip_prefix
from flowdup.random import Stream
from flowdup.settings import check_range


@dataclass(frozen=True)
class ATPConfig:
    """Settings of `atp`."""

    train_theta: bool = True  # false: rates alone are learned, for a theta that is trained already
    chunk: int = 2048  # points that are in memory at once when a new client adapts

    def __post_init__(self) -> None:
        check_range("method.chunk", self.chunk, 1)


class ATP(Method):
    """theta and a rate for each of its tensors in psi; see the file's docstring."""

    def __init__(self, config: ATPConfig, context: MethodContext) -> None:
        self.config, self.f, self.init_model = config, context.f, context.init_model
        self.scales = {n: math.prod(shape) ** -0.25 for n, shape in self.f.shapes.items()}

    def init(self, stream: Stream) -> Params:
        return prefixed("theta.", self.init_model(stream)) | {
            "rates": torch.zeros(len(self.scales))
        }

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        fixed = strip_prefix(start, "theta.")
        gradient = grad(self._entropy)(fixed, batch.x, batch.present)
        adapted = self._step(fixed, params["rates"], gradient, batch.present)
        loss = mean_loss(self.f(adapted, batch.x), batch)
        if self.config.train_theta:
            loss = loss + mean_loss(self.f(strip_prefix(params, "theta."), batch.x), batch)
        return loss

    def global_model(self, params: Params) -> Weights:
        return strip_prefix(params, "theta.")

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        theta = strip_prefix(params, "theta.")
        gradient = sum_gradients(self._entropy, theta, x, present, self.config.chunk)
        return self._step(theta, params["rates"], gradient, present)

    def _entropy(self, theta: Weights, x: Tensor, present: Tensor) -> Tensor:
        return sum_entropy(self.f(theta, x), present)

    def _step(self, theta: Weights, rates: Tensor, gradient: Weights, present: Tensor) -> Weights:
        """theta', from the gradient of the summed entropy."""
        rates = rates / present.sum().clamp(min=1)
        return {
            n: theta[n] - rate * scale * gradient[n]
            for (n, scale), rate in zip(self.scales.items(), rates, strict=True)
        }
