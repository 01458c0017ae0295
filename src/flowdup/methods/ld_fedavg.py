"""LD-FedAvg: one model for all, trained in a random subspace.

The low-dimensional baseline of Zakerinia, Scott, Lampert 2025.

    L(v) = mean over labeled (x, y) of l(y, f(x; theta_0 + P v))

Sent per client and round: v down and its update up, 4 k bytes each.  Only labeled clients train.

Departure: rows of P are scaled per layer (`subspace.row_scale`), of which the paper says nothing.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowdup.methods.base import Batch, Method, mean_loss
from flowdup.methods.context import MethodContext
from flowdup.models.network import Weights
from flowdup.params import Params
from flowdup.random import Stream
from flowdup.subspace import SubspaceConfig


@dataclass(frozen=True)
class LDFedAvgConfig:
    """Settings of `ld-fedavg`."""

    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)


class LDFedAvg(Method):
    """psi is v, a point of the subspace; see the file's docstring."""

    def __init__(self, config: LDFedAvgConfig, context: MethodContext) -> None:
        self.f = context.f
        self.subspace = context.subspace(config.subspace)
        self.fingerprint, self.k = self.subspace.fingerprint, self.subspace.k

    def init(self, stream: Stream) -> Params:
        return {"v": torch.zeros(self.subspace.k)}

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return mean_loss(self.f(self.subspace(params["v"]), batch.x), batch)

    def global_model(self, params: Params) -> Weights:
        return self.subspace(params["v"])

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return self.subspace(params["v"])
