"""FedAvg + Tent: the FedAvg model made surer of itself on a client's unlabeled data.

Wang et al., "Tent: Fully Test-Time Adaptation by Entropy Minimization", ICLR 2021, on the model of
FedAvg.

    H(theta; X) = mean over x in X of the entropy of softmax f(x; theta)
    theta'      = theta after `steps` gradient steps on H

Only the weights and biases of normalisation layers move, or all weights where f has no such layer
(`adapts`).  Training and what is sent are FedAvg's.

Departures: plain gradient steps on the whole set, where Tent goes through a stream of batches with
a momentum; and no statistics are re-estimated, since models here keep none.
"""

from dataclasses import dataclass

from torch import Tensor

from flowdup.errors import ConfigError
from flowdup.methods.base import NoSettings, sum_entropy, sum_gradients
from flowdup.methods.context import MethodContext
from flowdup.methods.fedavg import FedAvg
from flowdup.models.kinds import NORMALIZATION_LAYERS
from flowdup.models.network import Weights
from flowdup.params import Params
from flowdup.settings import check_range


@dataclass(frozen=True)
class FedAvgTentConfig:
    """Settings of `fedavg-tent`."""

    inner_lr: float = 0.01  # the rate of the steps that adapt a model to unlabeled data
    steps: int = 10  # that a new client takes
    adapts: str = "auto"  # norms, all, or auto: norms where there are any
    chunk: int = 2048  # points that are in memory at once

    def __post_init__(self) -> None:
        check_range("method.inner_lr", self.inner_lr, 0)
        check_range("method.steps", self.steps, 0)
        check_range("method.chunk", self.chunk, 1)
        if self.adapts not in ("auto", "norms", "all"):
            raise ConfigError(f"method.adapts is 'auto', 'norms' or 'all', not '{self.adapts}'")


class FedAvgTent(FedAvg):
    """FedAvg's training, and steps at a new client; see the file's docstring."""

    def __init__(self, config: FedAvgTentConfig, context: MethodContext) -> None:
        super().__init__(NoSettings(), context)
        self.config = config
        norms = {m for m in self.f.module.modules() if isinstance(m, NORMALIZATION_LAYERS)}
        owned = {id(p) for norm in norms for p in norm.parameters()}
        names = [n for n, p in self.f.module.named_parameters() if id(p) in owned]
        if config.adapts == "norms" and not names:
            raise ConfigError("the model has no normalisation layer: set method.adapts to 'all'")
        self.adapted = (
            list(self.f.shapes) if config.adapts == "all" else names or list(self.f.shapes)
        )

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        def entropy(moving: Weights, x: Tensor, present: Tensor) -> Tensor:
            return sum_entropy(self.f(params | moving, x), present)

        moving = {n: params[n] for n in self.adapted}
        rate = self.config.inner_lr / present.sum().clamp(min=1)
        for _ in range(self.config.steps):
            gradient = sum_gradients(entropy, moving, x, present, self.config.chunk)
            moving = {n: w - rate * gradient[n] for n, w in moving.items()}
        return params | moving
