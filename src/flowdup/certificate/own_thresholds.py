"""Scores of prediction sets that know how sure a client's own model is, from its unlabeled points.

With s(x, y) = 1 - p(y | x) and m points x' of the client,

    level(x, y) = (1 / m) sum of p(y' | x') over points and classes with s(x', y') < s(x, y)

is the coverage that the model expects of sets which stop short of the score s(x, y).  Sets at one
level for all clients are sets at a threshold of each one's own, higher where its model is unsure.
The class itself does not count: it would fill the level of a client with few points, whose sets
were then empty.  A model may be too sure of itself, and more so at some clients; where labeled
clients can tell, which must not be those that calibrate or are tested,

    need(k)  = the least -ln(1 - level) that covers a share 1 - alpha of client k's points
    score    = -ln(1 - level) - a - b (facts of the client),  a and b by ridge regression of `need`

with two facts, the share of points whose second class has p(y | x) > 0.2, and ln m.  Both kinds of
scores use the client's own points in the same way for all of them and for all clients, so that
thresholds by `prediction_sets` keep what they promise.  Clients are exchangeable with all that they
have, the number of their points too: nothing is promised to a client with far fewer points than
those that calibrate have.  A calibrated model errs on the safe side there, by larger sets: at m = 1
a set goes on until it has more than the level, and so is never empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flowdup.certificate.checks import Numbers
from flowdup.certificate.prediction_sets import (
    SetThresholds,
    covering_scores,
    label_scores,
    probability_scores,
)
from flowdup.errors import CertificateError

_LEAST = 1e-4  # of 1 - level, so that its logarithm is finite
_RIDGE = 1.0  # in clients
_LIKELY = 0.2  # of a second class
_NONE = -1.0  # a threshold below all scores
FEWEST_TO_FIT = 20  # clients, for two facts


def own_levels(probabilities: ArrayLike) -> Numbers:
    """The level of each class [n, classes]; `probabilities` [n, classes] are of all the client's
    points, with labels or without.
    """
    scores = probability_scores(probabilities)
    order = np.argsort(scores, axis=None, kind="stable")
    values = scores.reshape(-1)[order]
    expected = np.concatenate([[0.0], np.cumsum(1 - values)]) / len(scores)
    levels = np.empty(values.size)
    levels[order] = expected[np.searchsorted(values, values, side="left")]  # of those before
    return levels.reshape(scores.shape)


def own_sets(levels: SetThresholds, probabilities: ArrayLike) -> SetThresholds:
    """Thresholds of 1 - p(y | x) for one client, from levels that hold for all; `probabilities` [n,
    classes] are of all its points.
    """
    scores, own = probability_scores(probabilities), own_levels(probabilities)
    thresholds = (float(scores[own <= level].max(initial=_NONE)) for level in levels.thresholds)
    return SetThresholds(levels.coverages, tuple(thresholds))


@dataclass(frozen=True)
class FittedLevels:
    """What clients need beyond what their models expect, by their facts."""

    mean: tuple[float, ...]  # of facts, over the clients that it was fitted to
    deviation: tuple[float, ...]
    weights: tuple[float, ...]  # of 1 and of the standardised facts

    @classmethod
    def fit(
        cls, probabilities: Sequence[Numbers], labels: Sequence[ArrayLike], coverage: float
    ) -> "FittedLevels":
        """From labeled clients, each with probabilities [n, classes] and labels [n], negative where
        there is none.
        """
        if len(probabilities) < FEWEST_TO_FIT:
            raise CertificateError(
                f"{len(probabilities)} clients are too few to learn from how thresholds differ: "
                f"give at least {FEWEST_TO_FIT}, by data.validation_clients"
            )
        scores = []
        for p, y in zip(probabilities, map(np.asarray, labels), strict=True):
            scores.append(label_scores(_stretched(p)[y >= 0], y[y >= 0]))
        need = np.array(covering_scores(scores, coverage))
        facts = np.array([_facts(p) for p in probabilities])
        mean, deviation = facts.mean(0), np.maximum(facts.std(0), 1e-9)
        x = np.column_stack([np.ones(len(facts)), (facts - mean) / deviation])
        ridge = _RIDGE * np.diag([0.0, 1.0, 1.0])
        weights = np.linalg.solve(x.T @ x + ridge, x.T @ need)
        return cls(*(tuple(found.tolist()) for found in (mean, deviation, weights)))

    def scores(self, probabilities: ArrayLike) -> Numbers:
        """Of each class [n, classes], from the probabilities of all of a client's points."""
        table = np.asarray(probabilities, np.float64)
        facts = (_facts(table) - np.array(self.mean)) / np.array(self.deviation)
        return _stretched(table) - float(np.array([1.0, *facts]) @ np.array(self.weights))


def _stretched(probabilities: ArrayLike) -> Numbers:
    """-ln(1 - level)."""
    stretched: Numbers = -np.log(np.maximum(1 - own_levels(probabilities), 0) + _LEAST)
    return stretched


def _facts(probabilities: Numbers) -> Numbers:
    second = np.partition(probabilities, -2, axis=1)[:, -2]
    return np.array([(second > _LIKELY).mean(), np.log(len(probabilities))])
