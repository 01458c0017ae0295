"""Aggregation: the replies of a cohort in, one update of psi out.

An aggregation is a function of psi and of the replies as they come.  `mean` is content with sums
of many clients, which a batched engine gives.  One that must see every client (a clipped or noised
mean, a trimmed mean, a median) reads them through `one_by_one`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flowdup.errors import ConfigError
from flowdup.messages import Reply
from flowdup.params import Params, pack, unpack
from flowdup.rank_one import Factors


class Update(NamedTuple):
    """What an aggregation makes of the replies of a cohort."""

    delta: Params  # what psi should move by
    loss: Tensor  # the mean of the clients' objectives
    padding: float  # the share of the rows worked on that held no data


Aggregation = Callable[[Params, Iterable[Reply]], Update]


def mean(psi: Params, replies: Iterable[Reply]) -> Update:
    """The plain mean over clients."""
    whole = total(replies)
    delta = {n: whole.delta[n] for n in psi}
    vector = pack(delta) / whole.clients  # one division, however many tensors there are
    padding = 1 - whole.points / whole.rows
    return Update(unpack(vector, delta), whole.loss / whole.clients, padding)


def one_by_one(replies: Iterable[Reply]) -> Iterator[Reply]:
    """The replies of single clients, for an aggregation that must see each of them."""
    for reply in replies:
        if reply.clients > 1:
            raise ConfigError(
                "this aggregation needs every client's own reply, and the engine gives sums: set "
                "engine.name to 'sequential'"
            )
        yield reply


def total(replies: Iterable[Reply]) -> Reply:
    """One reply that is the sum of all; factors of all clients are multiplied at once."""
    sums: Params = {}
    own: set[str] = set()  # sums that are tensors of ours, not a reply's
    factors: dict[str, list[Factors]] = {}
    losses: list[Tensor] = []
    round, points, rows, clients = 0, 0, 0, 0
    for reply in replies:
        for name, change in reply.delta.items():
            if name in own:
                sums[name].add_(change)
            elif name in sums:
                sums[name] = sums[name] + change
                own.add(name)
            else:
                sums[name] = change
        for name, pair in reply.factors.items():
            factors.setdefault(name, []).append(pair)
        losses.append(reply.loss)
        round, clients = reply.round, clients + reply.clients
        points, rows = points + reply.points, rows + reply.rows
    for name, pairs in factors.items():
        product = Factors(*map(torch.cat, zip(*pairs, strict=True))).product()
        sums[name] = sums[name] + product if name in sums else product
    loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
    return Reply(round, sums, loss, points, rows, clients=clients)
