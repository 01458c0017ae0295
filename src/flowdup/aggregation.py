"""Aggregation: the replies of a cohort in, one update of psi out.

An aggregation is a function of psi and of the replies as they come.  `mean` is content with sums
of many clients, which a batched engine gives.  One that must see every client (a clipped or noised
mean, a trimmed mean, a median) reads them through `one_by_one`; `robust` is such a one, and leaves
out replies that do not fit psi, are not finite or are too long.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flowdup.errors import ConfigError, MessageError, TrainingError, shorten
from flowdup.messages import Refusal, Reply, Schema, schema_of
from flowdup.params import Params, pack, unpack
from flowdup.rank_one import Factors
from flowdup.settings import check_range

AGGREGATIONS = ("mean", "trimmed-mean", "median")
_BEYOND = ("clip", "refuse")
_BLOCK = 2**18  # numbers that are sorted at once, all clients' together


@dataclass(frozen=True)
class AggregationConfig:
    """Settings of `server.aggregation`: how replies become one update, and which are left out."""

    name: str = "mean"  # mean, or by coordinates trimmed-mean or median
    trim: float = 0.2  # the share of clients, one at least, that trimmed-mean drops at either end
    norm_bound: float = 0.0  # the largest norm of a client's update; 0: no limit
    beyond: str = "clip"  # what happens to a longer one: clip (it is scaled down) or refuse

    def __post_init__(self) -> None:
        if self.name not in AGGREGATIONS:
            raise ConfigError(
                f"unknown server.aggregation.name '{shorten(self.name)}': use one of "
                f"{', '.join(AGGREGATIONS)}"
            )
        if self.beyond not in _BEYOND:
            raise ConfigError(
                f"server.aggregation.beyond is clip or refuse, not '{shorten(self.beyond)}'"
            )
        check_range("server.aggregation.trim", self.trim, 0, 0.5)
        check_range("server.aggregation.norm_bound", self.norm_bound, 0)

    @property
    def sees_each(self) -> bool:
        """Whether it needs every client's own reply."""
        return self.name != "mean" or self.norm_bound > 0


class Guard(NamedTuple):
    """What an aggregation that sees every client found."""

    refused: tuple[Refusal, ...]
    clipped: int  # updates that were scaled down
    norm: float  # the median of the updates that were taken, before that


class Update(NamedTuple):
    """What an aggregation makes of the replies of a cohort."""

    delta: Params  # what psi should move by
    loss: Tensor  # the mean of the clients' objectives
    padding: float  # the share of the rows worked on that held no data
    guard: Guard | None = None  # None: replies were not looked at one by one


Noise = Callable[[Params, int], Params]  # of an update of psi that is a mean over so many clients
Aggregation = Callable[[Params, Iterable[Reply]], Update]


def mean(psi: Params, replies: Iterable[Reply]) -> Update:
    """The plain mean over clients."""
    whole = total(replies)
    delta = {n: whole.delta[n] for n in psi}
    vector = pack(delta) / whole.clients  # one division, however many tensors there are
    padding = 1 - whole.points / whole.rows
    return Update(unpack(vector, delta), whole.loss / whole.clients, padding)


def robust(
    config: AggregationConfig, round: int, clients: int, noise: Noise | None = None
) -> Aggregation:
    """The aggregation that the settings ask for, in a round of so many clients.

    With noise a mean is always over all that were asked, a refused or missing reply being zero, so
    that who answers has no weight of its own.
    """

    def aggregate(psi: Params, replies: Iterable[Reply]) -> Update:
        schema, refused, clipped = schema_of(psi), list[Refusal](), 0
        taken, norms, losses, points, rows = list[Tensor](), list[float](), list[Tensor](), 0, 0
        for reply in one_by_one(replies):
            try:
                vector, norm = _checked_vector(reply, round, schema, config)
            except MessageError as error:
                refused.append(Refusal(reply.member, str(error)))
                continue
            if config.norm_bound and norm > config.norm_bound:
                vector, clipped = vector * (config.norm_bound / norm), clipped + 1
            if config.name == "mean" and taken:
                taken[0] = taken[0] + vector
            else:
                taken.append(vector)
            norms.append(norm)
            losses.append(reply.loss)
            points, rows = points + reply.points, rows + reply.rows
        if not norms:
            why = f" ({refused[0].reason})" if refused else ""
            raise TrainingError(
                f"round {round} has no reply that can be used{why}: look at its clients, or raise "
                "server.aggregation.norm_bound"
            )
        if config.name == "mean":
            vector, loss = taken[0] / (clients if noise else len(norms)), torch.stack(losses).mean()
        else:
            dropped = _dropped(config, len(norms))
            vector, loss = _trimmed(taken, dropped), _trimmed(losses, dropped)
        delta = unpack(vector, {n: psi[n] for n in schema})
        if noise:
            delta = noise(delta, clients)
        found = Guard(tuple(refused), clipped, statistics.median(norms))
        return Update(delta, loss, 1 - points / rows, found)

    return aggregate


def _checked_vector(
    reply: Reply, round: int, schema: Schema, config: AggregationConfig
) -> tuple[Tensor, float]:
    """A client's update as one vector, and its norm; MessageError if it is to be left out."""
    whole = reply.check(round, schema).check_finite().whole_delta()
    vector = pack({n: whole[n] for n in schema})
    norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    if not bool(torch.isfinite(vector).all()):  # a product of finite factors may not be
        raise MessageError("a reply has factors whose product is not finite: drop it")
    if config.norm_bound and config.beyond == "refuse" and norm > config.norm_bound:
        raise MessageError(
            f"a reply has an update of norm {norm:.4g}, {config.norm_bound:.4g} is allowed: drop it"
        )
    return vector, norm


def _dropped(config: AggregationConfig, clients: int) -> int:
    """How many clients are left out at either end, so that one at least stays."""
    most = (clients - 1) // 2
    return most if config.name == "median" else min(most, max(1, int(config.trim * clients)))


def _trimmed(vectors: Sequence[Tensor], dropped: int) -> Tensor:
    """By coordinates, the mean without the lowest and the highest."""
    flat = [v.reshape(-1) for v in vectors]
    blocks = zip(*(torch.split(v, max(1, _BLOCK // len(flat))) for v in flat), strict=True)
    last = len(flat) - dropped
    found = [torch.stack(block).sort(0).values[dropped:last].mean(0) for block in blocks]
    return torch.cat(found).view_as(vectors[0])


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
