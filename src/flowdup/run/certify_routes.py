"""The routes of a certificate that need clients which nothing else has seen, as rows of a table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowdup.certificate.checks import Numbers
from flowdup.certificate.client_quantile import error_of_share, share_curve
from flowdup.certificate.held_out_clients import mean_error_bound
from flowdup.certificate.prediction_sets import (
    Sets,
    label_scores,
    label_shift_thresholds,
    make_sets,
    own_levels,
    probability_scores,
    quantile_of_quantiles,
    set_quality,
    split_threshold,
)
from flowdup.data import ClientData
from flowdup.evaluation import summarize
from flowdup.prior import log_prior

NEW_CLIENT = "clients that were set aside and new ones are drawn independently from one population"


@dataclass(frozen=True)
class Row:
    """One bound with what it is made of; `bound` is None where it was refused."""

    route: str
    data: str
    bound: float | None
    delta: float
    assumes: str
    empirical_risk: float | None = None  # that the bound starts from
    measured_error_unlabeled: float | None = None  # of clients without labels, what is bounded
    terms: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


class Answers:
    """What own models say of clients' labeled points: transductive, each from all its points."""

    def __init__(self, logits: Sequence[Tensor], clients: Sequence[ClientData]) -> None:
        self.known = [c.labels >= 0 for c in clients]
        self.y = [c.labels[k].numpy() for c, k in zip(clients, self.known, strict=True)]
        self.logits = [own.double() for own in logits]  # of all points

    @property
    def errors(self) -> list[float]:
        """The share of wrong predictions, by client."""
        found = zip(self.logits, self.known, self.y, strict=True)
        return [float((own[k].argmax(1).numpy() != y).mean()) for own, k, y in found]

    def scores(self, adjusted: bool = False, own: bool = False) -> list[Numbers]:
        """Of labeled points, for all classes [n, classes]: 1 - p(y | x), or own levels.

        `adjusted`: with probabilities that know the label shares, by EM on all points.
        """
        make = own_levels if own else probability_scores
        shifts = [self._log_shares(z) if adjusted else torch.zeros(()) for z in self.logits]
        found = zip(self.logits, shifts, self.known, strict=True)
        return [make((z + shift).softmax(1).numpy())[k.numpy()] for z, shift, k in found]

    def label_scores(self, adjusted: bool = False, own: bool = False) -> list[Numbers]:
        """Those of the labels."""
        found = self.scores(adjusted, own)
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


def quantile_row(
    own: Answers, measured: float | None, data: str, delta: float, share: float
) -> Row:
    """The error that a share of clients does not exceed; `measured` is the mean error."""
    errors = own.errors
    found = error_of_share(errors, share, delta)
    sentence = (
        f"with confidence {1 - delta:.0%}, at least {share:.0%} of clients have an error of at "
        f"most {found:.3f}"
    )
    curve = [point._asdict() for point in share_curve(errors, delta)]
    terms = {"clients": len(errors), "share": share, "sentence": sentence, "curve": curve}
    risk = float(np.mean(errors))
    return Row("client-quantile", data, found, delta, NEW_CLIENT, risk, measured, terms)


def set_rows(
    own: Answers, test: Answers | None, data: str, delta: float, coverage: float
) -> Iterator[Row]:
    """Versions of prediction sets; a bound is on the share of points whose class is not in its set.

    They hold on average over calibration clients (quantile: for a share of clients), so that delta
    is not used.
    """
    both = "clients, and points inside a client, are exchangeable"
    for version, adjusted, levels in (("", 0, 0), ("-em", 1, 0), ("-own", 0, 1), ("-em-own", 1, 1)):
        kind = {"adjusted": bool(adjusted), "own": bool(levels)}
        threshold = split_threshold(own.label_scores(**kind), coverage)
        sets = [make_sets(s, threshold) for s in test.scores(**kind)] if test else None
        yield _set_row(version, threshold, test, data, delta, coverage, both, sets)
    scores = own.label_scores()
    quantile = quantile_of_quantiles(scores, coverage)
    mostly = f"{both}; holds for 90 % of new clients, each by itself"
    sets = [make_sets(s, quantile) for s in test.scores()] if test else None
    yield _set_row("-quantile", quantile, test, data, delta, coverage, mostly, sets)
    if test:
        each = zip(test.shares(), test.scores(), strict=True)
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
