"""Knowing when not to personalise: whether a client's data look like those of training clients.

The score of a client is how far r(X) lies from the training clients' embeddings, under a Gaussian
with a few principal directions and one variance for all others (probabilistic PCA: Tipping and
Bishop, "Probabilistic Principal Component Analysis", JRSS B 1999):

    score = sum over directions of (projection)^2 / variance + (what is left)^2 / rest

A client whose score is above the limit is foreign.  The limit is an order statistic of validation
clients' scores, so that a new client of the same kind is called foreign with at most the stated
rate; few points make r(X) noisy, so there is a limit for several numbers of points.

What is stored are sums over all training clients, and of validation clients the limits alone.
Beware: a shift of labels given inputs shows in no input, and so not here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowdup.errors import ConfigError
from flowdup.settings import check_range

DIRECTIONS = 8
SIZES = (1, 3, 10, 30, 100, 300)  # numbers of points that limits are found for
_LEAST = 1e-12  # variance


@dataclass(frozen=True)
class Familiarity:
    """A summary of training clients' embeddings, with limits for new ones."""

    mean: Tensor  # [width]
    directions: Tensor  # [m, width], of length 1
    variances: Tensor  # [m]
    rest: float  # the variance in every other direction
    limits: Mapping[int, float]  # of scores, by the number of points
    rate: float  # of clients like those of training that are called foreign

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


def fit_familiarity(
    training: Sequence[Tensor],
    validation: Sequence[Tensor],
    embed: Callable[[Tensor], Tensor],
    rate: float = 0.05,
) -> Familiarity:
    """From the inputs of training clients and of validation clients; `embed` gives r(X).

    Among n validation clients the limit is the ceil((n + 1) (1 - rate))-th smallest score: a new
    client that is exchangeable with them exceeds it with probability `rate` at most.
    """
    check_range("the rate of false alarms", rate, 1e-6, 0.5)
    if len(training) < 2 or len(validation) < (least := math.ceil(1 / rate) - 1):
        raise ConfigError(
            f"a false-alarm rate of {rate:g} needs two training clients and {least} validation "
            f"clients, and there are {len(training)} and {len(validation)}: have more, or raise it"
        )
    summary = _fit(torch.stack([embed(x) for x in training]))
    limits = {}
    for size in _sizes(validation):
        cut = [x[:size] for x in validation if len(x) >= size]
        if len(cut) >= least:
            scores = sorted(summary.score(embed(x)) for x in cut)
            limits[size] = scores[min(len(cut), math.ceil((len(cut) + 1) * (1 - rate))) - 1]
    return Familiarity(
        summary.mean, summary.directions, summary.variances, summary.rest, limits, rate
    )


def _sizes(clients: Sequence[Tensor]) -> list[int]:
    """Numbers of points that clients have, and fewer."""
    smallest = min(map(len, clients))
    return sorted({*(size for size in SIZES if size < smallest), smallest})


def _fit(embeddings: Tensor) -> Familiarity:
    """The Gaussian alone, of embeddings [clients, width]."""
    count, width = embeddings.shape
    mean = embeddings.mean(0)
    _, lengths, directions = torch.linalg.svd((embeddings - mean).double(), full_matrices=False)
    variances = (lengths.square() / (count - 1)).clamp(min=_LEAST)
    m = min(DIRECTIONS, len(variances) - 1)
    rest = max(float(variances[m:].sum()) / max(width - m, 1), _LEAST)
    own = directions[:m].to(mean.dtype), variances[:m].to(mean.dtype)
    return Familiarity(mean, *own, rest, {}, 0.0)
