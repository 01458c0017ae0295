"""FLowDUP: each client its own model in a subspace, which a hypernetwork reads off unlabeled data.

Zakerinia, Scott, Lampert, "Federated Learning with Unlabeled Clients: Personalization Can Happen in
Low Dimensions", 2025.

    v     = h(X; psi_h)                                          eq. 3
    theta = theta_0 + P v                                        eq. 2
    L     = sum over (x', y') of l(y', f(x'; theta))             eq. 5, labeled clients
    Omega = || v - psi_r ||^2                                    eq. 6, all clients
    g     = gradient of L + lambda Omega by psi = (psi_h, psi_r)

Sent per client and round: psi, that is h1, h2 and psi_r, down and its update up; with h2 of one
hidden layer 4 bytes for each of d_h1 + (e + 1) w + (w + 1) k + k numbers, e the embedding's width
and w h2's.  theta_0 and P come from the seed.

Departures, each a setting: L is the mean over the half-batch (`reduction = "sum"` is the paper's
algorithm 2; lambda then counts per point), r(X) is normalised before h2, h2's last layer starts
small, rows of P are scaled per layer, and clients clip their gradient (`client.clip`): without it,
and unless the local learning rate is small, the first rounds are so violent that h1 forgets how
clients differ.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowdup.errors import ConfigError
from flowdup.hypernetwork import HypernetworkConfig
from flowdup.methods.base import Batch, Method, mean_loss
from flowdup.methods.context import MethodContext
from flowdup.models.network import Weights
from flowdup.params import Params
from flowdup.random import Stream
from flowdup.settings import check_range
from flowdup.subspace import SubspaceConfig


@dataclass(frozen=True)
class FLowDUPConfig:
    """Settings of `flowdup`."""

    regularization: float = 1e-4  # lambda, the weight of ||v - psi_r||^2
    reduction: str = "mean"  # of the loss over the half-batch: mean or sum
    learn_psi_r: bool = True  # false: psi_r stays 0 and is not sent
    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)
    hypernetwork: HypernetworkConfig = field(default_factory=HypernetworkConfig)

    def __post_init__(self) -> None:
        check_range("method.regularization", self.regularization, 0)
        if self.reduction not in ("mean", "sum"):
            raise ConfigError(f"method.reduction is 'mean' or 'sum', not '{self.reduction}'")


class FLowDUP(Method):
    """The paper's method: psi is the hypernetwork and psi_r; see the file's docstring."""

    learns_unlabeled = True
    has_embedding = True
    interpolates = True

    def __init__(self, config: FLowDUPConfig, context: MethodContext) -> None:
        self.config = config
        self.f = context.f
        self.subspace = context.subspace(config.subspace)
        self.fingerprint, self.k = self.subspace.fingerprint, self.subspace.k
        self.h = context.hypernetwork(config.hypernetwork, self.subspace.k)
        self.rank_one, self.lr_scales = self.h.matrices, self.h.lr_scales

    def init(self, stream: Stream) -> Params:
        psi_r = {"psi_r": torch.zeros(self.subspace.k)} if self.config.learn_psi_r else {}
        return self.h.init(stream) | psi_r

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        unlabeled, query = batch.halves()
        v = self.h(params, unlabeled.x, unlabeled.present)
        theta = self.subspace(v)
        return self.objective(params, v, self.f(theta, query.x), query)

    def objective(self, params: Params, v: Tensor, logits: Tensor, query: Batch) -> Tensor:
        """L + lambda Omega."""
        loss = mean_loss(logits, query)
        if self.config.reduction == "sum":
            loss = loss * query.labeled.sum()
        omega = (v - params["psi_r"] if self.config.learn_psi_r else v).square().sum()
        return loss + self.config.regularization * omega

    def global_model(self, params: Params) -> Weights:
        """theta_0 + P psi_r, what the regulariser holds clients near."""
        return self.subspace(params.get("psi_r", self.subspace.theta_0.new_zeros(self.subspace.k)))

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return self.subspace(self.h(params, x, present))

    def embedding(self, params: Params, x: Tensor, present: Tensor) -> Tensor:
        """r(X), which figure 1 of the paper shows."""
        return self.h.embedding(params, x, present)
