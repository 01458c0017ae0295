"""FedAvg with pseudo-labels: unlabeled clients train on what a model makes of their points.

Lee, "Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method for Deep Neural
Networks", ICML workshop 2013, inside FedAvg.  A point without a label gets the class that the
teacher thinks most probable, if it is sure enough.  The teacher is the model that the stage began
from, where there is a stage before (its weights are sent once), else FedAvg's own as the round
began.  With `prior`, the teacher knows how often each class occurs among the batch's points without
a label (EM, `prior.py`).

Beware: with `threshold` 0 a teacher that knows nothing yet teaches, too; begin from a stage before.

Sent per client and round: as FedAvg.  All clients train.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowdup.methods.base import Batch, NoSettings, adjusted_loss
from flowdup.methods.context import MethodContext
from flowdup.methods.fedavg import FedAvg
from flowdup.params import Params
from flowdup.prior import log_prior
from flowdup.settings import check_range


@dataclass(frozen=True)
class FedAvgPseudoConfig:
    threshold: float = 0.0  # the least probability of a pseudo-label
    prior: bool = True  # whether the teacher knows how often classes occur at a client
    sparsity: float = 0.03  # taken off each of these shares in EM, so that few classes remain
    adjusted: float = 0.0  # the share of the loss that knows class shares, as in fedavg-la

    def __post_init__(self) -> None:
        check_range("method.threshold", self.threshold, 0, 1)
        check_range("method.sparsity", self.sparsity, 0, 1)
        check_range("method.adjusted", self.adjusted, 0, 1)


class FedAvgPseudo(FedAvg):
    learns_unlabeled = True

    def __init__(self, config: FedAvgPseudoConfig, context: MethodContext) -> None:
        super().__init__(NoSettings(), context)
        self.config, self.teacher = config, context.start_here()

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        labeled = self._labeled(batch, start)
        return adjusted_loss(self.f(params, batch.x), labeled, self.config.adjusted)

    def _labeled(self, batch: Batch, start: Params) -> Batch:
        """The batch with pseudo-labels where it has none."""
        teacher = self.teacher or {n: start[n] for n in self.f.shapes}
        with torch.no_grad():
            logits = self.f(teacher, batch.x)
            without = batch.present - batch.labeled
            if self.config.prior:
                logits = logits + log_prior(logits, without, self.config.sparsity)
            confidence, y = logits.softmax(1).max(1)
            sure = without * (confidence >= self.config.threshold)
        return batch._replace(
            y=torch.where(batch.labeled > 0, batch.y, y), labeled=batch.labeled + sure
        )
