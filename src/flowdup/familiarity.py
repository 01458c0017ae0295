"""Knowing when not to personalise: whether a client's data look like those of training clients.

The score of a client is how far r(X) lies from the training clients' embeddings, under a Gaussian
with a few principal directions and one variance for all others (probabilistic PCA: Tipping and
Bishop, "Probabilistic Principal Component Analysis", JRSS B 1999):

    score = sum over directions of (projection)^2 / variance + (what is left)^2 / rest

A client whose score is above the limit is foreign.  The limit is an order statistic of validation
clients' scores, or of training clients' if that is higher, so that new clients of the same kind are
called foreign with at most the stated rate, in 19 of 20 draws of validation clients (a tolerance
limit: Wilks, "Determination of Sample Sizes for Setting Tolerance Limits", 1941).  Few points make
r(X) noisy, so there is a limit for several numbers of points.

What is stored are sums over all training clients, a map with how many of them lie where, as long as
they are not alone there, and of validation clients the limits alone.
Beware: a shift of labels given inputs shows in no input, and so not here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowdup.certificate.client_quantile import binomial_tail
from flowdup.errors import CheckpointError, ConfigError
from flowdup.files import write_atomic
from flowdup.settings import check_range
from flowdup.stored_tensors import all_finite
from flowdup.strict_json import (
    as_count,
    get_count,
    get_number,
    get_numbers,
    get_object,
    get_text,
    seal,
    unseal,
)

FORMAT = 1
FAMILIARITY = "familiarity.json"  # in the folder of the checkpoint whose embeddings it is of
DIRECTIONS = 8
SIZES = (1, 3, 10, 30, 100, 300)  # numbers of points that limits are found for
LEAST_CLIENTS = 10  # of training: a summary of fewer would tell of each
_DOUBT = 0.05  # that the rate is above the stated one
_LEAST = 1e-12  # variance, limit
_ALONE = 3  # clients; a cell of the map with fewer is shown empty
_CELLS = (4, 16)  # least and most of the map along a direction
_MOST_BYTES = 2**24  # of the file
_REACH = 3.0  # standard deviations that the map shows to each side


@dataclass(frozen=True)
class ClientMap:
    """How many training clients lie where, by their first two directions; too few count as none.

    counts[j][i] is of column i along the first direction and row j along the second, from low to
    high; clients beyond the edge are in the cells at the edge.
    """

    low: tuple[float, float]
    high: tuple[float, float]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Verdict:
    """What is said of one client."""

    score: float  # how far its data lie from those of training clients
    threshold: float  # above which it is foreign
    foreign: bool  # whether it is
    rate: float  # of clients like those of training that are called foreign


@dataclass(frozen=True)
class Familiarity:
    """A summary of training clients' embeddings, with limits for new ones."""

    mean: Tensor  # [width]
    directions: Tensor  # [m, width], of length 1
    variances: Tensor  # [m]
    rest: float  # the variance in every other direction
    limits: Mapping[int, float]  # of scores, by the number of points
    rate: float  # of clients like those of training that are called foreign
    map: ClientMap

    def score(self, embedding: Tensor) -> float:
        """How far r(X) [width] lies from the training clients'."""
        away = (embedding - self.mean).double()
        along = self.directions.double() @ away
        left = (away.square().sum() - along.square().sum()).clamp(min=0)
        return float((along.square() / self.variances.double()).sum() + left / self.rest)

    def limit(self, points: int) -> float:
        """The largest score of a client with so many points that is not foreign."""
        sizes = sorted(self.limits)
        below = max((s for s in sizes if s <= points), default=sizes[0])
        above = min((s for s in sizes if s >= points), default=sizes[-1])
        if below >= above:
            return self.limits[below]
        share = math.log(points / below) / math.log(above / below)
        return math.exp(
            (1 - share) * math.log(self.limits[below]) + share * math.log(self.limits[above])
        )

    def judge(self, embedding: Tensor, points: int) -> Verdict:
        """Whether a client is foreign, by the r(X) of its so many points."""
        if embedding.shape != self.mean.shape:
            raise CheckpointError(
                f"{FAMILIARITY} is of embeddings of another size: restore it from a copy, or "
                "delete it and go on without"
            )
        score, limit = self.score(embedding.cpu()), self.limit(points)
        score = score if math.isfinite(score) else math.inf
        return Verdict(score, limit, score > limit, self.rate)

    def table(self) -> dict[str, Any]:
        """As plain values, for JSON; `read_familiarity` reads it."""
        return {
            "mean": _plain(self.mean),
            "directions": [_plain(d) for d in self.directions],
            "variances": _plain(self.variances),
            "rest": self.rest,
            "limits": {str(size): limit for size, limit in self.limits.items()},
            "rate": self.rate,
            "map": {
                "low": list(self.map.low),
                "high": list(self.map.high),
                "counts": [list(row) for row in self.map.counts],
            },
        }


def check_enough(training: int, validation: int, rate: float) -> int:
    """How many validation clients a limit takes; ConfigError if there are too few clients."""
    check_range("the rate of false alarms", rate, 1e-6, 0.5)
    least = math.ceil(1 / rate) - 1
    if training < LEAST_CLIENTS or validation < least:
        raise ConfigError(
            f"to tell foreign clients at a false-alarm rate of {rate:g} it takes {LEAST_CLIENTS} "
            f"training clients and {least} validation clients, and there are {training} and "
            f"{validation}: have more, or raise the rate"
        )
    return least


def fit_familiarity(
    training: Sequence[Tensor],
    validation: Sequence[Tensor],
    embed: Callable[[Tensor], Tensor],
    rate: float = 0.05,
) -> Familiarity:
    """From the inputs of training clients and of validation clients; `embed` gives r(X).

    Among n validation clients the limit is the k-th smallest score with the least k for which
    P(Binomial(n, 1 - rate) >= k) is 0.05 at most, and the largest score where n is too small for
    that: clients that are exchangeable with them then exceed it at the rate on average.  Training
    clients raise it where a share `rate` of them has a higher score: validation clients may happen
    to be alike.  Points should be in random order: limits for few points are of the first.
    """
    least = check_enough(len(training), len(validation), rate)

    def embedded(x: Tensor) -> Tensor:
        r = embed(x).cpu()
        if r.ndim != 1:
            raise ConfigError(
                f"an embedding has {r.ndim} dimensions: to tell foreign clients by it, make it a "
                "vector"
            )
        if not bool(r.isfinite().all()):
            raise ConfigError(
                "clients' embeddings have NaN or infinite numbers, by which no foreign client can "
                "be told: train with a smaller learning rate"
            )
        return r

    of_training, of_validation = ([embedded(x) for x in c] for c in (training, validation))
    gaussian = _fit(torch.stack(of_training))

    def sorted_scores(clients: Sequence[Tensor], whole: Sequence[Tensor], size: int) -> list[float]:
        return sorted(
            gaussian.score(r if len(x) == size else embedded(x[:size]))
            for x, r in zip(clients, whole, strict=True)
            if len(x) >= size
        )

    limits = {}
    for size in _sizes(validation, least):
        own = sorted_scores(validation, of_validation, size)
        trained = sorted_scores(training, of_training, size)
        usual = trained[math.ceil(len(trained) * (1 - rate)) - 1] if trained else 0.0
        limits[size] = max(own[_rank(len(own), rate) - 1], usual, _LEAST)
    return replace(gaussian, limits=limits, rate=rate)


def read_familiarity(table: Mapping[str, Any]) -> Familiarity:
    """What `Familiarity.table` gave; ValueError if it is anything else."""
    mean, variances = get_numbers(table, "mean"), get_numbers(table, "variances")
    rows = [get_numbers({"directions": row}, "directions") for row in _rows(table, "directions")]
    if {*map(len, rows)} - {len(mean)} or len(rows) != len(variances):
        raise ValueError("its mean, directions and variances do not fit each other")
    limits = get_object(table, "limits")
    if not limits or not all(size.isdecimal() and 0 < int(size) < 2**63 for size in limits):
        raise ValueError("its limits are not by numbers of points")
    found = Familiarity(
        torch.tensor(mean, dtype=torch.float32),
        torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(mean)),
        torch.tensor(variances, dtype=torch.float32),
        get_number(table, "rest"),
        {int(size): get_number(limits, size) for size in limits},
        get_number(table, "rate"),
        _read_map(get_object(table, "map")),
    )
    tensors = {"mean": found.mean, "directions": found.directions, "variances": found.variances}
    positive = (*found.variances.tolist(), found.rest, *found.limits.values(), found.rate)
    if not all_finite(tensors) or not all(number > 0 for number in positive):
        raise ValueError("its variances or limits are not above 0, or its numbers too large")
    return found


def store_familiarity(folder: Path, found: Familiarity, psi_sha256: str) -> None:
    """Write it into a checkpoint's folder, sealed; the digest says of which psi its r(X) are."""
    table = {"format": FORMAT, "psi_sha256": psi_sha256, "familiarity": found.table()}
    write_atomic(folder / FAMILIARITY, seal(table))


def stored_familiarity(folder: Path, psi_sha256: str) -> Familiarity | None:
    """That in a checkpoint's folder; None where there is none, or one of another psi."""
    path = folder / FAMILIARITY
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too long")
        table = unseal(path.read_bytes())
        if get_count(table, "format") != FORMAT:
            raise ValueError("it is of another version of flowdup")
        same = get_text(table, "psi_sha256") == psi_sha256
        return read_familiarity(get_object(table, "familiarity")) if same else None
    except ValueError as error:
        raise CheckpointError(
            f"{path} says nothing of training clients ({error}): restore it from a copy, or "
            "delete it and go on without"
        ) from None


def remove_familiarity(folder: Path) -> None:
    """Delete what a checkpoint's folder has of it."""
    (folder / FAMILIARITY).unlink(missing_ok=True)


def _read_map(table: Mapping[str, Any]) -> ClientMap:
    low, high = get_numbers(table, "low"), get_numbers(table, "high")
    counts = tuple(tuple(as_count(c, "counts") for c in row) for row in _rows(table, "counts"))
    sides = {*map(len, counts)}
    if len(low) != 2 or len(high) != 2 or len(sides) != 1 or 0 in sides:
        raise ValueError("its map is no grid")
    (left, bottom), (right, top) = low, high
    if left >= right or bottom >= top:
        raise ValueError("its map has no extent")
    return ClientMap((left, bottom), (right, top), counts)


def _rows(table: Mapping[str, Any], key: str) -> list[list[Any]]:
    found = table.get(key)
    if not isinstance(found, list) or not all(isinstance(row, list) for row in found):
        raise ValueError(f"'{key}' is no list of lists")
    return found


def _rank(clients: int, rate: float) -> int:
    """The least k for which the k-th smallest of so many scores is exceeded at most at the rate,
    with confidence; all of them, where no k will do.
    """
    mean = math.floor(clients * (1 - rate))  # fewer will not do
    likely = range(max(mean, 1), clients)
    return next((k for k in likely if binomial_tail(k, clients, 1 - rate) <= _DOUBT), clients)


def _sizes(clients: Sequence[Tensor], least: int) -> list[int]:
    """Numbers of points that enough clients have, the largest such number among them."""
    largest = sorted(map(len, clients))[-least]
    return sorted({*(size for size in SIZES if size < largest), largest})


def _fit(embeddings: Tensor) -> Familiarity:
    """The Gaussian and the map alone, of embeddings [clients, width]."""
    count, width = embeddings.shape
    mean = embeddings.mean(0)
    _, lengths, directions = torch.linalg.svd((embeddings - mean).double(), full_matrices=False)
    variances = (lengths.square() / (count - 1)).clamp(min=_LEAST)
    m = min(DIRECTIONS, len(variances) - 1)
    rest = max(float(variances[m:].sum()) / max(width - m, 1), _LEAST)
    own = directions[:m].to(mean.dtype).contiguous(), variances[:m].to(mean.dtype)
    places = _draw((embeddings - mean).double() @ directions[:m].T, variances[:m])
    return Familiarity(mean, *own, rest, {}, 0.0, places)


def _draw(projections: Tensor, variances: Tensor) -> ClientMap:
    """The map of clients [clients, m]; where there is one direction only, the other is 0."""
    flat = torch.zeros(len(projections), 2).double()
    reach = torch.ones(2).double()
    shown = min(2, projections.shape[1])
    flat[:, :shown] = projections[:, :shown]
    reach[:shown] = _REACH * variances[:shown].sqrt()
    least, most = _CELLS
    side = min(max(math.isqrt(len(flat)), least), most)
    cells = ((flat / reach + 1) / 2 * side).long().clamp(0, side - 1)  # [clients, 2]
    counts = torch.bincount(cells[:, 1] * side + cells[:, 0], minlength=side * side)
    counts = torch.where(counts < _ALONE, 0, counts).reshape(side, side)
    x, y = (float(f"{r:.9g}") for r in reach)
    return ClientMap((-x, -y), (x, y), tuple(tuple(row) for row in counts.tolist()))


def _plain(tensor: Tensor) -> list[float]:
    """Numbers with the digits that float32 has."""
    return [float(f"{number:.9g}") for number in tensor.tolist()]
