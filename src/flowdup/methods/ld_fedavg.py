"""LD-FedAvg: FedAvg over the subspace vector v (the FLowDUP paper's low-dimensional baseline).

    L(v) = mean over labeled (x, y) of l(y, f(x; theta_0 + P v))

Sent each way and round: v, k numbers.  Only labeled clients train.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowdup.methods.base import Batch, mean_loss
from flowdup.methods.parts import Parts
from flowdup.models.network import Weights
from flowdup.params import Params
from flowdup.random import Stream
from flowdup.subspace import SubspaceConfig


@dataclass(frozen=True)
class LDFedAvgConfig:
    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)


class LDFedAvg:
    learns_unlabeled = False

    def __init__(self, config: LDFedAvgConfig, parts: Parts) -> None:
        self.f = parts.f
        self.subspace = parts.subspace(config.subspace)
        self.fingerprint = self.subspace.fingerprint

    def init(self, stream: Stream) -> Params:
        return {"v": torch.zeros(self.subspace.k)}

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return mean_loss(self.f(self.subspace(params["v"]), batch.x), batch)

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return self.subspace(params["v"])
