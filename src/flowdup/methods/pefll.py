"""PeFLL: each client its own model, all d weights emitted by a hypernetwork, here without labels.

Scott, Zakerinia, Lampert, "PeFLL: Personalized Federated Learning by Learning to Learn", ICLR 2024.

    r     = mean over x in X of h1(x)
    theta = theta_0 + h2(r)                       h2: four hidden layers, d outputs
    L     = mean over labeled (x, y) of l(y, f(x; theta))

X is the batch that L is taken on.  Only labeled clients train, and nothing regularises.

Sent per client and round: h1 and h2 down and their updates up, 4 bytes for each of d_h1 + (e + 1) w
+ 3 (w + 1) w + (w + 1) d numbers: about w times FedAvg's.  (The source keeps h2 at the server and
sends theta and h1 instead, 4 (d + d_h1) bytes each way, at the price of a server that sees every
client's model.)

Departures: the embedding sees no labels and no class is masked, as the client has none; theta_0
from the seed is added, so that training starts from a sound network; r is normalised by its own
mean and deviation, not by those of the first client ever seen; e = 100 for any number n of clients,
not 1 + n / 4; h2's last hidden layer has a ReLU too; the gradient is that of L itself, where the
source takes 50 local steps on theta and sends the difference back through h2.
"""

from dataclasses import dataclass, field

from torch import Tensor

from flowdup.hypernetwork import HypernetworkConfig
from flowdup.methods.base import Batch, Method, mean_loss
from flowdup.methods.context import MethodContext
from flowdup.models.network import Weights
from flowdup.params import Params
from flowdup.random import Stream
from flowdup.subspace import SubspaceConfig


@dataclass(frozen=True)
class PeFLLConfig:
    """Settings of `pefll`."""

    hypernetwork: HypernetworkConfig = field(
        default_factory=lambda: HypernetworkConfig(embedding=100, hidden=100, layers=4)
    )


class PeFLL(Method):
    """psi is a hypernetwork whose output is all weights; see the file's docstring."""

    has_embedding = True

    def __init__(self, config: PeFLLConfig, context: MethodContext) -> None:
        self.f = context.f
        self.subspace = context.subspace(SubspaceConfig("identity", k=0))
        self.fingerprint, self.k = self.subspace.fingerprint, self.subspace.k
        self.h = context.hypernetwork(config.hypernetwork, self.subspace.k)
        self.rank_one, self.lr_scales = self.h.matrices, self.h.lr_scales

    def init(self, stream: Stream) -> Params:
        return self.h.init(stream)

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        theta = self.personalize(params, batch.x, batch.present)
        return mean_loss(self.f(theta, batch.x), batch)

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return self.subspace(self.h(params, x, present))

    def embedding(self, params: Params, x: Tensor, present: Tensor) -> Tensor:
        return self.h.embedding(params, x, present)
