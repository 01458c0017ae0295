"""FedAvg with pseudo-labels: unlabeled clients train on what the model itself is sure of.

Lee, "Pseudo-Label", ICML workshop 2013, inside FedAvg, with label shares found by EM as in
`fedavg-em`.

Sent per client and round: as FedAvg.  All clients train.
"""

from dataclasses import dataclass

from torch import Tensor

from flowdup.methods.base import Batch, NoSettings, mean_loss, pseudo_loss
from flowdup.methods.context import MethodContext
from flowdup.methods.fedavg import FedAvg
from flowdup.params import Params
from flowdup.settings import check_range


@dataclass(frozen=True)
class FedAvgPseudoConfig:
    weight: float = 1.0
    sure: float = 0.95  # the least probability of a pseudo-label

    def __post_init__(self) -> None:
        check_range("method.weight", self.weight, 0)
        check_range("method.sure", self.sure, 0, 1)


class FedAvgPseudo(FedAvg):
    learns_unlabeled = True

    def __init__(self, config: FedAvgPseudoConfig, context: MethodContext) -> None:
        super().__init__(NoSettings(), context)
        self.config = config

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        logits = self.f(params, batch.x)
        pseudo = pseudo_loss(logits, batch, self.config.sure)
        return mean_loss(logits, batch) + self.config.weight * pseudo
