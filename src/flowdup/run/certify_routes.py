"""The routes of a certificate that need clients which nothing else has seen, as rows of a table."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowdup.certificate.checks import Numbers
from flowdup.certificate.client_quantile import error_of_share, share_curve
from flowdup.certificate.held_out_clients import mean_error_bound
from flowdup.certificate.own_thresholds import FEWEST_TO_FIT, FittedLevels, own_levels
from flowdup.certificate.prediction_sets import (
    FLOOR_BELOW,
    FLOOR_SHARE,
    Sets,
    floor_threshold,
    label_scores,
    label_shift_thresholds,
    make_sets,
    probability_scores,
    quantile_of_quantiles,
    set_quality,
    split_threshold,
)
from flowdup.data import ClientData
from flowdup.evaluation import summarize
from flowdup.prior import log_prior

MakeScores = Callable[[Numbers], Numbers]  # of all a client's points: probabilities -> scores

NEW_CLIENT = "clients that were set aside and new ones are drawn independently from one population"


@dataclass(frozen=True)
class Row:
    """One bound with what it is made of; `bound` is None where it was refused.

    `measured_error_unlabeled` is the error of the clients that the bound is about, on the points
    they have, with labels that nothing else has used.  It is the deployed psi's, also where a
    sampled predictor is bounded (whose own error is `empirical_risk`); where another psi is bounded
    that is not sampled, the prior's or a quantised one, it is that psi's.  For prediction sets it
    is the share of points that their sets miss, for a quantile the same quantile of their errors.
    """

    route: str
    data: str
    bound: float | None
    delta: float
    assumes: str
    empirical_risk: float | None = None  # that the bound starts from
    measured_error_unlabeled: float | None = None
    terms: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


class Answers:
    """What own models say of clients' labeled points: transductive, each from all its points."""

    def __init__(self, logits: Sequence[Tensor], clients: Sequence[ClientData]) -> None:
        self.labels = [c.labels.numpy() for c in clients]  # of all points, -1: none
        self.known = [c.labels >= 0 for c in clients]
        self.y = [c.labels[k].numpy() for c, k in zip(clients, self.known, strict=True)]
        self.logits = [own.double() for own in logits]  # of all points

    @property
    def errors(self) -> list[float]:
        """The share of wrong predictions, by client."""
        found = zip(self.logits, self.known, self.y, strict=True)
        return [float((own[k].argmax(1).numpy() != y).mean()) for own, k, y in found]

    def probabilities(self, adjusted: bool = False) -> list[Numbers]:
        """Of all points [n, classes]; `adjusted` by label shares from EM."""
        shifts = [self._log_shares(z) if adjusted else torch.zeros(()) for z in self.logits]
        return [(z + s).softmax(1).numpy() for z, s in zip(self.logits, shifts, strict=True)]

    def scores(self, make: MakeScores, adjusted: bool = False) -> list[Numbers]:
        """Of labeled points, for all classes [n, classes]."""
        found = zip(self.probabilities(adjusted), self.known, strict=True)
        return [make(p)[known.numpy()] for p, known in found]

    def label_scores(
        self, make: MakeScores = probability_scores, adjusted: bool = False
    ) -> list[Numbers]:
        """Those of the labels."""
        found = self.scores(make, adjusted)
        return [label_scores(scores, y) for scores, y in zip(found, self.y, strict=True)]

    def shares(self) -> list[Numbers]:
        """Label shares by EM, from all points of each client."""
        return [self._log_shares(own).softmax(0).numpy() for own in self.logits]

    @staticmethod
    def _log_shares(logits: Tensor) -> Tensor:
        return log_prior(logits, torch.ones(len(logits), dtype=logits.dtype))


def held_out_row(own: Answers, measured: float | None, data: str, delta: float) -> Row:
    """The mean error of a new client."""
    errors = own.errors
    return Row(
        "held-out-clients",
        data,
        mean_error_bound(errors, delta),
        delta,
        NEW_CLIENT,
        float(np.mean(errors)),
        measured,
        {"clients": len(errors)},
    )


def quantile_row(own: Answers, test: Answers | None, data: str, delta: float, share: float) -> Row:
    """The error that a share of clients does not exceed."""
    errors = own.errors
    found = error_of_share(errors, share, delta)
    sentence = (
        f"with confidence {1 - delta:.0%}, at least {share:.0%} of clients have an error of at "
        f"most {found:.3f}"
    )
    curve = [point._asdict() for point in share_curve(errors, delta)]
    terms = {"clients": len(errors), "share": share, "sentence": sentence, "curve": curve}
    risk = _least_of_share(errors, share)
    measured = None if test is None else _least_of_share(test.errors, share)
    return Row("client-quantile", data, found, delta, NEW_CLIENT, risk, measured, terms)


def _least_of_share(errors: Sequence[float], share: float) -> float:
    """The least error that a share of these clients does not exceed."""
    enough = math.ceil(share * len(errors) - 1e-9)  # 0.55 * 100 is a little more than 55
    return sorted(errors)[max(enough, 1) - 1]


def set_rows(
    own: Answers,
    test: Answers | None,
    validation: Answers | None,
    data: str,
    delta: float,
    coverage: float,
) -> Iterator[Row]:
    """Versions of prediction sets; a bound is on the share of points whose class is not in its set.

    They hold on average over calibration clients (quantile: for a share of clients), so that delta
    is not used.
    """
    both = "clients, and points inside a client, are exchangeable"
    versions: dict[str, tuple[MakeScores, bool]] = {
        "": (probability_scores, False),
        "-em": (probability_scores, True),
        "-own": (own_levels, False),
        "-em-own": (own_levels, True),
    }
    best: MakeScores = own_levels
    if validation and len(validation.y) >= FEWEST_TO_FIT:
        best = FittedLevels.fit(validation.probabilities(), validation.labels, coverage).scores
        versions["-fitted"] = (best, False)
    for version, (make, adjusted) in versions.items():
        threshold = split_threshold(own.label_scores(make, adjusted), coverage)
        sets = [make_sets(s, threshold) for s in test.scores(make, adjusted)] if test else None
        yield _set_row(version, threshold, test, data, delta, coverage, both, sets)
    if len(own.y) * (1 - FLOOR_SHARE) >= FLOOR_SHARE:
        floor = floor_threshold(own.label_scores(best), coverage)
        sets = [make_sets(s, floor) for s in test.scores(best)] if test else None
        also = (
            f"{both}; also holds with {FLOOR_BELOW:.0%} less for {FLOOR_SHARE:.0%} of new clients"
        )
        yield _set_row("-floor", floor, test, data, delta, coverage, also, sets)
    scores = own.label_scores()
    quantile = quantile_of_quantiles(scores, coverage)
    mostly = f"{both}; holds for 90 % of new clients, each by itself"
    sets = [make_sets(s, quantile) for s in test.scores(probability_scores)] if test else None
    yield _set_row("-quantile", quantile, test, data, delta, coverage, mostly, sets)
    if test:
        each = zip(test.shares(), test.scores(probability_scores), strict=True)
        sets = [
            make_sets(s, label_shift_thresholds(scores, own.y, q / q.sum(), coverage))
            for q, s in each
        ]
    only = "clients differ in their label shares alone, and EM finds these: an estimate, no proof"
    yield _set_row("-label-shift", None, test, data, delta, coverage, only, sets)


def _set_row(
    version: str,
    threshold: float | None,
    test: Answers | None,
    data: str,
    delta: float,
    coverage: float,
    assumes: str,
    sets: Sequence[Sets] | None,
) -> Row:
    terms: dict[str, Any] = {"threshold": threshold, "coverage": coverage}
    missed = None
    if test and sets:
        found = [set_quality(s, y) for s, y in zip(sets, test.y, strict=True)]
        covered = summarize([quality.coverage for quality in found])
        size = summarize([quality.size for quality in found], higher_is_better=False)
        missed = 1 - (covered.mean or 0.0)
        terms |= {
            "measured_coverage": covered.mean,
            "measured_coverage_worst_decile": covered.worst_decile,
            "measured_size": size.mean,
            "measured_size_worst_decile": size.worst_decile,
        }
    bound = None if version == "-label-shift" else 1 - coverage
    return Row(f"prediction-sets{version}", data, bound, delta, assumes, None, missed, terms)
