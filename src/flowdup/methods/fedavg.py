"""FedAvg: one model for all.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017.

    L(theta) = mean over labeled (x, y) of l(y, f(x; theta))

Sent per client and round: theta down and its update up, 4 d bytes each.  Only labeled clients
train.

Departure: as in the FLowDUP paper, the server takes the plain mean over clients, where McMahan et
al. weigh them by their number of points.
"""

from torch import Tensor

from flowdup.methods.base import Batch, Method, NoSettings, mean_loss
from flowdup.methods.context import MethodContext
from flowdup.models.network import Weights
from flowdup.params import Params
from flowdup.random import Stream


class FedAvg(Method):
    """psi is the model; the base of methods that train as FedAvg does."""

    def __init__(self, config: NoSettings, context: MethodContext) -> None:
        self.f, self.init_model = context.f, context.init_model

    def init(self, stream: Stream) -> Params:
        return self.init_model(stream)

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return mean_loss(self.f(params, batch.x), batch)

    def global_model(self, params: Params) -> Weights:
        return params

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return params
