"""Conformal prediction sets for a new client: the client is the exchangeable unit, not the point.

The score of class y at input x is s = 1 - p(y | x), or one of `own_thresholds`; a set has all
classes with s <= threshold.  Clients differ, so points of different clients are not exchangeable
and the usual split-conformal threshold over all points is wrong.  With K calibration clients of m_k
points each, scores s_kj:

split      the 1 - alpha quantile of  sum over k, j of delta(s_kj) / ((K + 1) m_k)
           + delta(infinity) / (K + 1).  A point of a new client is covered with probability
           1 - alpha, over the draw of all clients (Lee, Barber, Willett, "Distribution-free
           inference with hierarchical data", 2023).
quantile   q_k = the least threshold that covers a share 1 - alpha of client k's points; the
of         ceil((K + 1) (1 - beta))-th of them.  With probability 1 - beta a new client has at least
quantiles  a share 1 - alpha of its own points covered (after Humbert et al., ICML 2023).
floor      the larger of a split threshold and a quantile of quantiles for a smaller share: both
           promises hold.
label      the split quantile with weights w(y_kj) = q(y_kj) / pi(y_kj) and w(y) for the new point,
shift      q the new client's label shares and pi the calibration clients' (Podkopaev, Ramdas, UAI
           2021).  Beware: it covers if p(x | y) is the same at all clients and q is known; with q
           from EM it is an estimate, and no guarantee is left.

Assumes for the first two: clients are exchangeable, and so are points inside a client.  Scores may
use the client's own unlabeled points (its personal model, its EM label shares), as long as they do
so in the same way for all its points and for all clients.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flowdup.certificate.checks import Numbers, check_shares
from flowdup.errors import CertificateError

Sets = NDArray[np.bool_]  # [points, classes]
FLOOR_BELOW, FLOOR_SHARE = 0.05, 0.97  # how much less coverage, at what share of clients
_SLACK = 1e-12  # of sums of weights
_COVERAGES = tuple(percent / 100 for percent in range(50, 100))


@dataclass(frozen=True)
class SetThresholds:
    """Split thresholds of a federation by coverage, all that a client needs to make sets."""

    coverages: tuple[float, ...]  # ascending
    thresholds: tuple[float, ...]

    @classmethod
    def of(cls, scores: Sequence[Numbers]) -> "SetThresholds":
        """For the coverages that so many calibration clients allow."""
        most = len(scores) / (len(scores) + 1)
        own = tuple(coverage for coverage in _COVERAGES if coverage <= most)
        return cls(own, tuple(split_threshold(scores, coverage) for coverage in own))

    def find(self, coverage: float) -> float:
        """That of the least coverage stored which is no smaller."""
        check_shares(coverage=coverage)
        for own, threshold in zip(self.coverages, self.thresholds, strict=True):
            if own >= coverage - _SLACK:
                return threshold
        most = max(self.coverages, default=0.0)
        raise CertificateError(
            f"a coverage of {coverage:g} cannot be had, {most:g} is the most that was calibrated: "
            "ask for less, or set more clients aside with data.certify_clients"
        )


class SetQuality(NamedTuple):
    """How good a client's sets are."""

    coverage: float  # the share of points whose class is in its set
    size: float  # classes in a set, on average


def probability_scores(probabilities: ArrayLike) -> Numbers:
    """1 - p(y | x) [n, classes], of probabilities of the same shape."""
    return 1 - np.asarray(probabilities, np.float64)


def label_scores(scores: ArrayLike, y: ArrayLike) -> Numbers:
    """Those of known labels y [n], from the scores of all classes [n, classes]."""
    table, labels = np.asarray(scores, np.float64), np.asarray(y, np.int64)
    return table[np.arange(len(labels)), labels]


def split_threshold(scores: Sequence[Numbers], coverage: float) -> float:
    """From the scores of every calibration client's points."""
    clients = _check(scores, coverage)
    if coverage > clients / (clients + 1) + _SLACK:
        raise _too_few(clients, coverage, coverage)
    values = np.concatenate(scores)
    weights = np.concatenate([np.full(len(s), 1 / ((clients + 1) * len(s))) for s in scores])
    return _quantile(values, weights, coverage)


def quantile_of_quantiles(
    scores: Sequence[Numbers], coverage: float, client_share: float = 0.9
) -> float:
    """The threshold at which a share of clients has at least this coverage each."""
    clients = _check(scores, coverage)
    check_shares(client_share=client_share)
    place = math.ceil((clients + 1) * client_share - _SLACK)
    if place > clients:
        raise _too_few(clients, coverage, client_share)
    return sorted(covering_scores(scores, coverage))[place - 1]


def floor_threshold(scores: Sequence[Numbers], coverage: float) -> float:
    """Covers so much on average, and 0.05 less at 97 % of clients, each by itself."""
    least = max(coverage - FLOOR_BELOW, 0.5 * coverage)
    own = quantile_of_quantiles(scores, least, FLOOR_SHARE)
    return max(split_threshold(scores, coverage), own)


def covering_scores(scores: Sequence[Numbers], coverage: float) -> list[float]:
    """For each client the least threshold that covers such a share of its points."""
    return [float(np.sort(s)[math.ceil(coverage * len(s) - _SLACK) - 1]) for s in scores]


def label_shift_thresholds(
    scores: Sequence[Numbers],
    labels: Sequence[NDArray[np.int64]],
    shares: ArrayLike,
    coverage: float,
) -> Numbers:
    """One threshold for each class [classes], for a client with these label shares.

    Infinite for a class that the new client may have and calibration clients never had.
    """
    clients = _check(scores, coverage)
    new = np.asarray(shares, np.float64)
    if new.ndim != 1 or (new < 0).any() or abs(new.sum() - 1) > 1e-6:
        raise CertificateError("label shares must be at least 0 and have the sum 1: normalise them")
    each = [np.bincount(y, minlength=new.size) / len(y) for y in labels]
    old = np.sum(each, 0) / clients
    ratio = np.divide(new, old, out=np.full_like(new, np.inf), where=old > 0)
    values, y = np.concatenate(scores), np.concatenate(labels)
    weights = ratio[y] * np.concatenate([np.full(len(s), 1 / len(s)) for s in scores])
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    wanted = coverage * (reached[-1] + ratio)  # the new point's own weight lies at infinity
    place = np.searchsorted(reached, wanted - _SLACK * wanted, side="left")
    thresholds: Numbers = np.append(values[order], np.inf)[place]
    return thresholds


def make_sets(scores: ArrayLike, threshold: float | Numbers) -> Sets:
    """Which classes belong to each point's set, by their scores [n, classes]; a threshold, or one
    for each class.
    """
    found: Sets = np.asarray(scores, np.float64) <= threshold
    return found


def set_quality(sets: Sets, y: ArrayLike) -> SetQuality:
    """Coverage and mean size, of points with known labels y [n]."""
    labels = np.asarray(y, np.int64)
    covered = sets[np.arange(len(labels)), labels]
    return SetQuality(float(covered.mean()), float(sets.sum(1).mean()))


def _quantile(values: Numbers, weights: Numbers, level: float) -> float:
    """The least value up to which the weights reach the level."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    place = int(np.searchsorted(reached, level - _SLACK))
    return float(values[order[min(place, len(order) - 1)]])


def _check(scores: Sequence[Numbers], coverage: float) -> int:
    check_shares(coverage=coverage)
    if not scores or not all(map(len, scores)):
        raise CertificateError(
            "prediction sets need calibration clients, each with labeled points: set some aside "
            "with data.certify_clients"
        )
    return len(scores)


def _too_few(clients: int, coverage: float, share: float) -> CertificateError:
    needed = math.ceil(share / (1 - share) - 1e-9)
    return CertificateError(
        f"{clients} calibration clients are too few for a coverage of {coverage:g}: set at least "
        f"{needed} aside with data.certify_clients, or ask for less"
    )
