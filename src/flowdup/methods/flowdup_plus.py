"""FLowDUP+: FLowDUP from a trained start, learning what class shares alone do not explain.

FLowDUP (`flowdup.py`) as the last stage of a run.  theta_0 and h1's trunk come from the stage
before, FedAvg's say, calibrated on validation clients.  Where clients differ in their class shares,
EM on theta_0's logits finds these shares q on the generating half (`prior.py`), and

    L = sum over (x', y') of l(y', f(x'; theta_0 + P v) + log q)

so that v = 0 is FedAvg with a corrected prior already, and h learns what is better than that.
Personal models are corrected in the same way: use it with `method.correction = "em"`.

Further departures from FLowDUP, each a setting: r(X) has the deviation of every feature beside its
mean (`hypernetwork.pooling`), and h1 may be taught to classify as well (`head`).

Sent per client and round: as FLowDUP, with 2 e for e; and once theta_0, 4 d bytes.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowdup.hypernetwork import HypernetworkConfig
from flowdup.methods.base import Batch, mean_loss
from flowdup.methods.context import MethodContext
from flowdup.methods.flowdup import FLowDUP, FLowDUPConfig
from flowdup.params import Params, strip_prefix
from flowdup.prior import log_prior
from flowdup.random import Stream
from flowdup.settings import check_range


@dataclass(frozen=True)
class FLowDUPPlusConfig(FLowDUPConfig):
    hypernetwork: HypernetworkConfig = field(
        default_factory=lambda: HypernetworkConfig(pooling="mean-std")
    )
    head: float = 0.0  # the weight of a classification loss of h1, through a layer of its own
    prior: bool = True  # whether the loss knows class shares; false: FLowDUP's loss
    sparsity: float = 0.03  # of class shares in training

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.head", self.head, 0)
        check_range("method.sparsity", self.sparsity, 0, 1)


class FLowDUPPlus(FLowDUP):
    def __init__(self, config: FLowDUPPlusConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.prior, self.sparsity, self.head = config.prior, config.sparsity, config.head
        self.classes, self.features = context.spec.classes, config.hypernetwork.embedding
        self.start = context.start_here()

    def init(self, stream: Stream) -> Params:
        head = {
            "head.weight": torch.zeros(self.classes, self.features),
            "head.bias": torch.zeros(self.classes),
        }
        return super().init(stream) | (head if self.head else {})

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        unlabeled, query = batch.halves()
        z = self.h.h1(strip_prefix(params, "h1."), unlabeled.x)  # [B/2, embedding]
        v = self.h.head(params, self.h.pool([(z, unlabeled.present)]))
        logits = self.f(self.subspace(v), query.x)
        if self.prior and self.start:  # the logits of an untrained theta_0 tell nothing
            logits = logits + self._log_shares(unlabeled)
        loss = self.objective(params, v, logits, query)
        if self.head:
            own = z @ params["head.weight"].T + params["head.bias"]
            loss = loss + self.head * mean_loss(own, unlabeled)
        return loss

    @torch.no_grad()
    def _log_shares(self, unlabeled: Batch) -> Tensor:
        """log q."""  # [classes]
        return log_prior(self.f(self.start, unlabeled.x), unlabeled.present, self.sparsity)
