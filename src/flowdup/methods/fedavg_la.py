"""FedAvg with logit adjustment: part of the loss knows the client's label shares.

Menon et al., "Long-tail Learning via Logit Adjustment", ICLR 2021, at each client: where q(y) is
the share of class y by the batch's labels,

    L(theta) = mean over labeled (x, y) of (1 - a) l(y, f(x; theta)) + a l(y, f(x; theta) + log q)

The second term teaches classes of one client to be told from each other, and not that other classes
are rare, which is true at this client only.  With a = 1 nothing holds classes of different clients
apart; a = 1/2 makes the model whose personal models, corrected for class shares
(`method.correction`), are best.

Sent per client and round: as FedAvg.  Only labeled clients train.
"""

from dataclasses import dataclass

from torch import Tensor

from flowdup.methods.base import Batch, NoSettings, adjusted_loss
from flowdup.methods.context import MethodContext
from flowdup.methods.fedavg import FedAvg
from flowdup.params import Params
from flowdup.settings import check_range


@dataclass(frozen=True)
class FedAvgLAConfig:
    """Settings of `fedavg-la`."""

    adjusted: float = 0.5  # a: the share of the loss that knows the client's class shares

    def __post_init__(self) -> None:
        check_range("method.adjusted", self.adjusted, 0, 1)


class FedAvgLA(FedAvg):
    """FedAvg with another loss; see the file's docstring."""

    def __init__(self, config: FedAvgLAConfig, context: MethodContext) -> None:
        super().__init__(NoSettings(), context)
        self.config = config

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return adjusted_loss(self.f(params, batch.x), batch, self.config.adjusted)
