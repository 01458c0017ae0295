"""FLowDUP+: FLowDUP whose theta_0 is trained too, which knows class shares and teaches itself.

FLowDUP (`flowdup.py`) with a global model theta in the place of theta_0, trained by its own loss at
the same time, and best begun from a stage of FedAvg, which theta and h1's trunk start from:

    y(x)  = the client's label, else that of a teacher, where it is sure (`teacher.py`)
    L_0   = mean over (x, y) of l(y, f(x; theta)), with logit adjustment (`fedavg_la.py`)
    L     = mean over (x', y') of l(y', f(x'; theta + P v) + log q),  theta as the round began
    g     = gradient of L_0 + personal (L + lambda Omega) by psi = (theta, psi_h, psi_r)

The teacher is theta, averaged over rounds and calibrated, so unlabeled clients teach h and theta as
labeled ones do.  q are the label shares of the batch: h learns what class shares alone do not
explain.  Personal models are corrected for class shares as well, and drawn back to theta where that
is better for validation clients: use it with `method.correction = "em"` and `server.averaging`.

Departures from FLowDUP, each a setting: the above, r(X) has the deviation of every feature beside
its mean (`hypernetwork.pooling`), and h1 may be taught to classify the generating half (`head`, a
loss beside L).  With `train_theta = false`, theta and the teacher are what the stage began from,
and L + lambda Omega is all.

Sent per client and round: as FLowDUP with 2 e for e; theta, 4 d bytes each way; and the teacher,
4 d down.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowdup.hypernetwork import HypernetworkConfig
from flowdup.methods.base import Batch, adjusted_loss, log_label_shares, mean_loss
from flowdup.methods.context import MethodContext
from flowdup.methods.flowdup import FLowDUP, FLowDUPConfig
from flowdup.methods.teacher import Teacher, TeacherConfig
from flowdup.models.network import Weights
from flowdup.params import Params, prefixed, strip_prefix
from flowdup.random import Stream
from flowdup.settings import check_range


@dataclass(frozen=True)
class FLowDUPPlusConfig(FLowDUPConfig):
    hypernetwork: HypernetworkConfig = field(
        default_factory=lambda: HypernetworkConfig(pooling="mean-std")
    )
    train_theta: bool = True  # false: theta stays what the stage began from
    adjusted: float = 0.5  # the share of L_0 that knows the client's label shares
    personal: float = 0.1  # the weight of L and lambda Omega beside L_0
    prior: bool = True  # whether L knows label shares
    pseudo_labels: bool = True  # whether there is a teacher
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    head: float = 0.0  # the weight of a classification loss of h1, through a layer of its own

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.adjusted", self.adjusted, 0, 1)
        for name in ("personal", "head"):
            check_range(f"method.{name}", getattr(self, name), 0)


class FLowDUPPlus(FLowDUP):
    def __init__(self, config: FLowDUPPlusConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.plus, self.init_model = config, context.init_model
        self.head_shape = context.spec.classes, config.hypernetwork.embedding
        self.relabels = config.pseudo_labels
        self.teacher = Teacher(config.teacher, context)
        self.broadcast = self.teacher.broadcast if self.relabels else ()

    def init(self, stream: Stream) -> Params:
        psi = super().init(stream)
        if self.plus.train_theta:
            psi |= prefixed("theta.", self.init_model(stream.child("theta")))
        if self.plus.head:
            psi |= {
                "head.weight": torch.zeros(self.head_shape),
                "head.bias": torch.zeros(self.head_shape[0]),
            }
        return psi

    def labels(self, start: Params, x: Tensor, y: Tensor, present: Tensor) -> Tensor:
        return self.teacher.labels(start, x, y, present)

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        unlabeled, query = batch.halves()
        z = self.h.h1(strip_prefix(params, "h1."), unlabeled.x)  # [B/2, embedding]
        v = self.h.head(params, self.h.pool([(z, unlabeled.present)]))
        logits = self.f(self.subspace(v, strip_prefix(start, "theta.")), query.x)
        if self.plus.prior:
            logits = logits + log_label_shares(batch, logits)
        loss = self.objective(params, v, logits, query)
        if self.plus.head:
            own = z @ params["head.weight"].T + params["head.bias"]
            loss = loss + self.plus.head * mean_loss(own, unlabeled)
        if self.plus.train_theta:
            theta = strip_prefix(params, "theta.")
            for_all = adjusted_loss(self.f(theta, batch.x), batch, self.plus.adjusted)
            loss = for_all + self.plus.personal * loss
        return loss

    def server_state(self) -> Params:
        return self.teacher.server_state() if self.relabels else {}

    def update_server_state(
        self, state: Params, loss: Tensor, model: Callable[[], Weights]
    ) -> Params:
        learns = self.relabels and self.plus.train_theta
        return self.teacher.updated(state, model()) if learns else state

    def global_model(self, params: Params) -> Weights:
        return strip_prefix(params, "theta.") or super().global_model(params)

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return self.subspace(self.h(params, x, present), strip_prefix(params, "theta."))
