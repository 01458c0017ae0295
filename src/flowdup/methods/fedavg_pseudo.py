"""FedAvg with pseudo-labels: unlabeled clients train on what a teacher makes of their points.

FedAvg's loss, or that of FedAvg with logit adjustment (`fedavg_la.py`), where points without a
label have the one that the federation's own averaged model gives them (`teacher.py`).

Best with `server.averaging`, `method.correction = "em"`, which calibrates the teacher, and about as
many labeled as unlabeled clients in a cohort (`server.alpha`).

Sent per client and round: as FedAvg, and the teacher down, 4 d bytes.  All clients train.
"""

from dataclasses import dataclass, field

from torch import Tensor

from flowdup.methods.base import Batch, Deployed, NoSettings, adjusted_loss
from flowdup.methods.context import MethodContext
from flowdup.methods.fedavg import FedAvg
from flowdup.methods.teacher import Teacher, TeacherConfig
from flowdup.params import Params
from flowdup.settings import check_range


@dataclass(frozen=True)
class FedAvgPseudoConfig:
    """Settings of `fedavg-pseudo`."""

    adjusted: float = 0.5  # the share of the loss that knows label shares, as in fedavg-la
    teacher: TeacherConfig = field(default_factory=TeacherConfig)

    def __post_init__(self) -> None:
        check_range("method.adjusted", self.adjusted, 0, 1)


class FedAvgPseudo(FedAvg):
    """FedAvg with labels by a `Teacher`; see the file's docstring."""

    learns_unlabeled = True
    relabels = True

    def __init__(self, config: FedAvgPseudoConfig, context: MethodContext) -> None:
        super().__init__(NoSettings(), context)
        self.config, self.teacher = config, Teacher.for_everyone(config.teacher, context)
        self.broadcast = self.teacher.broadcast

    def labels(self, start: Params, x: Tensor, y: Tensor, present: Tensor) -> Tensor:
        return self.teacher.labels(start, x, y, present)

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return adjusted_loss(self.f(params, batch.x), batch, self.config.adjusted)

    def server_state(self) -> Params:
        return self.teacher.server_state()

    def update_server_state(self, state: Params, loss: Tensor, deployed: Deployed) -> Params:
        return self.teacher.updated(state, deployed.global_model())
