"""FedProx: FedAvg whose clients stay near the model that they were sent.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

    L(theta) = mean over labeled (x, y) of l(y, f(x; theta)) + mu / 2 ||theta - theta_start||^2

mu adapts as in their appendix: it grows by 0.1 when the loss has risen, shrinks by 0.1 when it has
fallen at least five times in a row, and is never below 0.  As in the FLowDUP paper, it starts at 1.

Sent per client and round: theta and mu down, 4 d + 4 bytes; the update of theta up, 4 d bytes.
Only labeled clients train.

Departures: Li et al. start at 1 for IID data only, at 0 otherwise.  The loss is the cohort's mean
objective (the proximal term included), since no server can ask all clients every round.  It depends
on who is in the cohort, so means over `period` rounds are compared: with single rounds half of all
comparisons are rises by chance, and mu grows without end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowdup.methods.base import Batch, Deployed, NoSettings
from flowdup.methods.context import MethodContext
from flowdup.methods.fedavg import FedAvg
from flowdup.params import Params
from flowdup.settings import check_range

_STEP = 0.1
_FALLS = 5


@dataclass(frozen=True)
class FedProxConfig:
    """Settings of `fedprox`."""

    mu: float = 1.0  # the weight of the distance from the model that was sent, at the start
    adaptive: bool = True  # whether mu grows when the loss rises and shrinks when it falls
    period: int = 10  # rounds whose mean loss is one observation

    def __post_init__(self) -> None:
        check_range("method.mu", self.mu, 0)
        check_range("method.period", self.period, 1)


class FedProx(FedAvg):
    """FedAvg with a proximal term, whose weight the server broadcasts."""

    broadcast = ("mu",)

    def __init__(self, config: FedProxConfig, context: MethodContext) -> None:
        super().__init__(NoSettings(), context)
        self.config = config

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        distance = torch.stack([(p - start[n]).square().sum() for n, p in params.items()]).sum()
        return super().loss(params, batch, start) + start["mu"] / 2 * distance

    def server_state(self) -> Params:
        """mu; the rounds of this period and their total loss; the mean of the period before; how
        many times in a row the mean has fallen.
        """
        zero = torch.zeros(())
        return {
            "mu": torch.tensor(self.config.mu),
            "rounds": zero,
            "total": zero,
            "before": torch.tensor(torch.nan),
            "falls": zero,
        }

    def update_server_state(self, state: Params, loss: Tensor, deployed: Deployed) -> Params:
        if not self.config.adaptive:
            return state
        rounds, total = state["rounds"] + 1, state["total"] + loss
        mean, zero = total / rounds, torch.zeros_like(total)
        falls = torch.where(mean < state["before"], state["falls"] + 1, zero)
        change = _STEP * (mean > state["before"]) - _STEP * (falls >= _FALLS)
        mu = (state["mu"] + change).clamp(min=0)
        observed = {"mu": mu, "rounds": zero, "total": zero, "before": mean, "falls": falls}
        waiting = state | {"rounds": rounds, "total": total}
        due = rounds >= self.config.period
        return {n: torch.where(due, new, waiting[n]) for n, new in observed.items()}
