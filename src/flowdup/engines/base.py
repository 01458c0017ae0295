"""What an engine is: where the clients of a round do their work."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flowdup.client import ClientConfig, batch_plan
from flowdup.data.clients import ClientData, LazyClients
from flowdup.methods import Batch, Params
from flowdup.random import Stream


class SupportQuery(NamedTuple):
    """Personalize a model on the unlabeled support set; then apply it to the query set."""

    support: Tensor  # [n, *shape]
    query: Tensor  # [m, *shape]


Cohort = Mapping[int, int]  # by lane of the round's orders, which client draws its batches there


class CohortUpdate(NamedTuple):
    delta: Params  # the mean of all members' updates
    loss: Tensor  # the mean of their objectives
    padding: float  # the share of the rows worked on that held no data


class Engine(Protocol):
    def train(
        self,
        params: Params,
        clients: Sequence[ClientData],
        cohort: Cohort,
        orders: Stream,
        told: Params,
    ) -> CohortUpdate:
        """One round of ClientUpdate for the members of a cohort.

        `told` is what the server tells clients besides the parameters.
        """
        ...

    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
        """Logits of every client's own model, [m, classes] each, on the CPU in psi's dtype."""
        ...


def longest(clients: Sequence[ClientData]) -> int:
    """The most points that one of them has, if known; 0 where asking would make them all."""
    if isinstance(clients, LazyClients):
        return clients.points
    return max(map(len, clients)) if isinstance(clients, list) else 0


def local_batches(client: ClientData, config: ClientConfig, orders: Stream, lane: int) -> Batch:
    """All of a client's local batches of one round, [steps, B, ...]."""
    plan = torch.from_numpy(batch_plan(orders, len(client), config, lane))
    rows, present = plan.clamp(min=0), plan >= 0
    x = client.x.index_select(0, rows.flatten())  # ten times as fast as client.x[rows]
    x = x.reshape(*rows.shape, *client.x.shape[1:])
    y = torch.full_like(rows, -1) if client.y is None else client.y[rows]
    return Batch(_channels_last(x), y.clamp(min=0), present, present & (y >= 0))


def on_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    x, y, present, labeled = (t.to(device, non_blocking=True) for t in batch)
    return Batch(x, y, present.to(dtype), labeled.to(dtype))


def _channels_last(x: Tensor) -> Tensor:
    """Images [steps, B, channels, height, width] as they are, but laid out pixel by pixel: much
    faster through convolutions and pooling.
    """
    return x.movedim(2, -1).contiguous().movedim(-1, 2) if x.ndim == 5 else x
