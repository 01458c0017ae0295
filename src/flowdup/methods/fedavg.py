"""FedAvg: one model for all.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017.

    L(theta) = mean over labeled (x, y) of l(y, f(x; theta))

Sent per client and round: theta down and its update up, 4 d bytes each.  Only labeled clients
train.

Departure: as in the FLowDUP paper, the server takes the plain mean over clients, where McMahan et
al. weigh them by their number of points.
"""

from dataclasses import dataclass

from torch import Tensor

from flowdup.methods.base import Batch, Method, mean_loss
from flowdup.methods.parts import Parts
from flowdup.models.network import Weights
from flowdup.params import Params
from flowdup.random import Stream


@dataclass(frozen=True)
class FedAvgConfig:
    pass


class FedAvg(Method):
    def __init__(self, config: FedAvgConfig, parts: Parts) -> None:
        self.f = parts.f

    def init(self, stream: Stream) -> Params:
        return self.f.init(stream)

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return mean_loss(self.f(params, batch.x), batch)

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return params
