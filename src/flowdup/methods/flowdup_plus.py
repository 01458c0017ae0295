"""FLowDUP+: FLowDUP that begins from FedAvg's model, learns theta_0 on, and knows class shares.

FLowDUP (`flowdup.py`) with a global model theta in the place of theta_0, which is trained as well,
and mostly begun from a stage of FedAvg, which theta and h1's trunk start from:

    L   = mean over (x', y') of l(y', f(x'; theta + P v) + log q)
    L_0 = mean over (x, y) of l(y, f(x; theta)), with logit adjustment (`fedavg_la.py`)
    g   = gradient of L + lambda Omega + global_loss L_0 by psi = (theta, psi_h, psi_r)

q are the client's label shares: h learns what class shares alone do not explain.  Personal
models are corrected for class shares as well, and drawn back to theta where that is better for
validation clients: use it with `method.correction = "em"` and `server.averaging`.

Departures from FLowDUP, each a setting: the above, and r(X) has the deviation of every feature
beside its mean (`hypernetwork.pooling`).  Off by default: all points of a batch make the model and
score it (`split_batch = false`), h1 taught to classify the points that it reads (`head`, a loss
beside L), and labels by a teacher for points that have none (`pseudo_labels`, `teacher.py`), which
is theta or, with `personal_teacher`, the client's own model theta + P v.  With `train_theta =
false`, theta is what the stage began from, without L_0.

Sent per client and round: as FLowDUP with 2 e for e; theta, 4 d bytes each way; and a teacher,
4 d down, a personal one as much as psi.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowdup.errors import ConfigError
from flowdup.hypernetwork import HypernetworkConfig
from flowdup.methods.base import Batch, Deployed, adjusted_loss, log_label_shares, mean_loss
from flowdup.methods.context import MethodContext
from flowdup.methods.flowdup import FLowDUP, FLowDUPConfig
from flowdup.methods.teacher import Teacher, TeacherConfig
from flowdup.models.network import Weights
from flowdup.params import Params, prefixed, strip_prefix
from flowdup.random import Stream, ZeroStream
from flowdup.settings import check_range


@dataclass(frozen=True)
class FLowDUPPlusConfig(FLowDUPConfig):
    """Settings of `flowdup-plus`, those of `flowdup` among them."""

    hypernetwork: HypernetworkConfig = field(
        default_factory=lambda: HypernetworkConfig(pooling="mean-std")
    )
    train_theta: bool = True  # false: theta stays what the stage began from
    global_loss: float = 0.5  # the weight of L_0, the loss of theta alone, beside L
    adjusted: float = 0.5  # the share of L_0 that knows the client's label shares
    prior: bool = True  # whether L knows label shares
    pseudo_labels: bool = False  # whether a teacher labels points that have no label
    personal_teacher: bool = False  # whether that teacher is the client's own model, not theta
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    split_batch: bool = True  # half a batch makes the model, half scores it; false: all do both
    head: float = 0.0  # the weight of a classification loss of h1, through a layer of its own

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.adjusted", self.adjusted, 0, 1)
        for name in ("global_loss", "head"):
            check_range(f"method.{name}", getattr(self, name), 0)
        if self.personal_teacher and not self.pseudo_labels:
            raise ConfigError(
                "method.personal_teacher says whose labels clients train on, and there are none "
                "without method.pseudo_labels = true: set both, or neither"
            )


class FLowDUPPlus(FLowDUP):
    """FLowDUP whose psi has theta, too; see the file's docstring."""

    def __init__(self, config: FLowDUPPlusConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.plus, self.init_model = config, context.init_model
        self.head_shape = context.spec.classes, config.hypernetwork.embedding
        self.relabels = config.pseudo_labels
        if self.relabels:
            self.teacher = self._teacher(context)
            self.broadcast = self.teacher.broadcast

    def _teacher(self, context: MethodContext) -> Teacher:
        config = self.plus
        if config.personal_teacher:
            shapes = {n: tuple(p.shape) for n, p in self.init(ZeroStream(0)).items()}
            theta = prefixed("theta.", context.start_here()) if config.train_theta else {}
            return Teacher(config.teacher, context, shapes, theta, self.personalize)
        if not config.train_theta and not context.start:
            raise ConfigError(
                "method.pseudo_labels needs a teacher, and with train_theta = false there is none "
                "but the model of a stage before: give one in [[before]] or `start`, or set "
                "method.train_theta or method.personal_teacher to true"
            )
        return Teacher.for_everyone(config.teacher, context)

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
        unlabeled, query = batch.halves() if self.plus.split_batch else (batch, batch)
        z = self.h.h1(strip_prefix(params, "h1."), unlabeled.x)  # [points, embedding]
        v = self.h.head(params, self.h.pool([(z, unlabeled.present)]))
        theta = strip_prefix(params, "theta.")
        logits = self.f(self.subspace(v, theta), query.x)
        if self.plus.prior:
            logits = logits + log_label_shares(batch, logits)
        loss = self.objective(params, v, logits, query)
        if self.plus.head:
            own = z @ params["head.weight"].T + params["head.bias"]
            loss = loss + self.plus.head * mean_loss(own, unlabeled)
        if theta:
            for_all = adjusted_loss(self.f(theta, batch.x), batch, self.plus.adjusted)
            loss = loss + self.plus.global_loss * for_all
        return loss

    def server_state(self) -> Params:
        return self.teacher.server_state() if self.relabels else {}

    def update_server_state(self, state: Params, loss: Tensor, deployed: Deployed) -> Params:
        if not self.relabels:
            return state
        if self.plus.personal_teacher:
            return self.teacher.updated(state, deployed.params)
        if self.plus.train_theta:
            return self.teacher.updated(state, deployed.global_model())
        return state

    def global_model(self, params: Params) -> Weights:
        return strip_prefix(params, "theta.") or super().global_model(params)

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return self.subspace(self.h(params, x, present), strip_prefix(params, "theta."))
