"""FedAvg + EM: the FedAvg model corrected for how often each class occurs at the client.

Saerens, Latinne, Decaestecker, "Adjusting the Outputs of a Classifier to New a Priori
Probabilities: A Simple Procedure", Neural Computation 2002, on the model of FedAvg.

    p(y | x) = softmax f(x; theta)                  with the classes' shares pi of all labels
    w(y | x) proportional to p(y | x) q(y) / pi(y)                                      E-step
    q(y)     = mean over x in X of w(y | x)         `steps` times, from q = pi          M-step

The client's model is theta with log q - log pi added to the bias of f's last layer.  Strong where
clients differ in their labels only.

Sent per client and round: as FedAvg, and pi with its update, 4 C bytes more each way.

Departure: the source knows pi by counting.  Here no client tells its counts: pi is learned with
theta, as the minimum of the mean of ||pi - onehot(y)||^2 / 2 over all labels, and starts uniform.
`client.clip` limits the gradient of theta and pi together, so only without it is theta exactly
FedAvg's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowdup.methods.base import Batch, Method, mean_loss
from flowdup.methods.context import MethodContext
from flowdup.methods.features import FeatureModel
from flowdup.models.network import Weights
from flowdup.params import Params, prefixed, strip_prefix
from flowdup.random import Stream
from flowdup.settings import check_range

_LEAST = 1e-6  # the share that a class keeps, so that logarithms are finite


@dataclass(frozen=True)
class FedAvgEMConfig:
    """Settings of `fedavg-em`."""

    steps: int = 100  # of EM, for the class shares of a client
    chunk: int = 2048  # points that pass through f at once

    def __post_init__(self) -> None:
        check_range("method.steps", self.steps, 0)
        check_range("method.chunk", self.chunk, 1)


class FedAvgEM(Method):
    """FedAvg's training, and models with a bias that EM finds; see the file's docstring."""

    def __init__(self, config: FedAvgEMConfig, context: MethodContext) -> None:
        self.config = config
        self.f, self.classes = context.f, context.spec.classes
        self.init_model = context.init_model
        self.bias = FeatureModel.of(context.f, context).bias

    def init(self, stream: Stream) -> Params:
        return prefixed("theta.", self.init_model(stream)) | {
            "pi": torch.full((self.classes,), 1 / self.classes)
        }

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        pi = params["pi"]
        miss = (pi @ pi + 1) / 2 - pi[batch.y]  # [B]: ||pi - onehot(y)||^2 / 2
        share = batch.labeled @ miss / batch.labeled.sum().clamp(min=1)
        return mean_loss(self.f(strip_prefix(params, "theta."), batch.x), batch) + share

    def global_model(self, params: Params) -> Weights:
        return strip_prefix(params, "theta.")

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        theta, log_pi = strip_prefix(params, "theta."), params["pi"].clamp(min=_LEAST).log()
        logits = torch.cat([self.f(theta, rows) for rows in torch.split(x, self.config.chunk)])
        shift = self.prior_shift(logits, log_pi, present)
        return theta | {self.bias: theta[self.bias] + shift}

    def prior_shift(self, logits: Tensor, log_pi: Tensor, present: Tensor) -> Tensor:
        """log q - log pi, by EM on logits [n, classes]."""  # [classes]
        shift = torch.zeros_like(log_pi)
        for _ in range(self.config.steps):
            w = (logits + shift).softmax(1)  # [n, classes]
            q = present @ w / present.sum().clamp(min=1)
            shift = q.clamp(min=_LEAST).log() - log_pi
        return shift
