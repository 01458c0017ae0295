"""Aggregation: the replies of a cohort in, one update of psi out.

An aggregation is a function of psi and of the replies as they come.  `mean` is content with sums
of many clients, which a batched engine gives.  One that must see every client (a clipped or noised
mean, a trimmed mean, a median) asks for replies with `clients == 1`.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from flowdup.messages import Reply
from flowdup.params import Params, pack, unpack
from flowdup.rank_one import Factors


class Update(NamedTuple):
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


def total(replies: Iterable[Reply]) -> Reply:
    """One reply that is the sum of all; factors of all clients are multiplied at once."""
    ordered = iter(replies)
    first = next(ordered)
    sums, losses = dict(first.delta), [first.loss]
    factors = {n: [f] for n, f in first.factors.items()}
    points, rows, clients = first.points, first.rows, first.clients
    for number, reply in enumerate(ordered):
        add = Tensor.add_ if number else Tensor.add  # the first sum is a tensor of our own
        sums = {n: add(s, reply.delta[n]) for n, s in sums.items()}
        for name, own in reply.factors.items():
            factors[name].append(own)
        losses.append(reply.loss)
        points, rows = points + reply.points, rows + reply.rows
        clients += reply.clients
    for name, parts in factors.items():
        sums[name] = Factors(*map(torch.cat, zip(*parts, strict=True))).product()
    loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
    return Reply(first.round, sums, loss, points, rows, clients=clients)
