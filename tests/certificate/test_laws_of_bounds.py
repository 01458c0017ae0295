"""Monotonicities of the bounds, and what is refused with a sentence."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdup.certificate import (
    client_quantile,
    compression,
    kl,
    own_thresholds,
    pac_bayes,
    prediction_sets,
)
from flowdup.certificate.checks import harmonic_mean
from flowdup.certificate.held_out_clients import mean_error_bound
from flowdup.certificate.pac_bayes import Clients
from flowdup.errors import CertificateError

settings.register_profile("certificate", deadline=None, max_examples=40)
settings.load_profile("certificate")
deltas = st.floats(0.001, 0.4)
risks = st.floats(0, 0.6)
norms = st.floats(0, 1e6)
SLACK = 1e-12


@given(risks, st.floats(0, 3), st.floats(0, 3))
def test_kl_inversion_grows_with_the_level_and_lies_above(q: float, a: float, b: float) -> None:
    low, high = (kl.kl_inverse(q, level) for level in sorted((a, b)))
    assert q <= low <= high <= 1
    assert high <= q + math.sqrt(max(a, b) / 2) + 1e-7  # Pinsker


@given(st.floats(0.01, 0.6), st.floats(0, 1), st.floats(0.05, 0.9))
def test_knowing_that_a_sample_has_no_replacement_only_helps(
    q: float, level: float, beta: float
) -> None:
    found = kl.transductive_kl_inverse(q, level, beta)
    assert q <= found <= kl.kl_inverse(q, level) + 1e-6
    assert found <= q + math.sqrt((1 - beta) * level / 2) + 1e-6  # the paper's square root


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), deltas, deltas)
def test_held_out_clients(errors: list[float], a: float, b: float) -> None:
    low, high = (mean_error_bound(errors, delta) for delta in sorted((a, b), reverse=True))
    assert sum(errors) / len(errors) - SLACK <= low <= high
    assert mean_error_bound(errors * 2, a) <= mean_error_bound(errors, a) + SLACK  # more clients


@given(st.integers(2, 200), st.data(), deltas)
def test_order_statistics(n: int, data: st.DataObject, delta: float) -> None:
    k = data.draw(st.integers(1, n - 1))
    share = client_quantile.share_bound(k, n, delta)
    assert share < client_quantile.share_bound(k + 1, n, delta) < 1
    assert share < k / n
    assert client_quantile.share_bound(k, n, delta / 2) < share
    assert client_quantile.dkw_margin(n + 1, delta) < client_quantile.dkw_margin(n, delta)


@given(risks, norms, norms, st.integers(20, 400), st.integers(20, 400), st.floats(1, 500), deltas)
def test_the_papers_bound(
    risk: float, a: float, b: float, labeled: int, rest: int, m: float, delta: float
) -> None:
    clients = Clients(labeled, labeled + rest, m)

    def bound(risk: float, norm: float, c: float, clients: Clients, delta: float) -> float:
        return pac_bayes.theorem_1(risk, norm, 0.1, [c], clients, delta).bound

    here = bound(risk, a, b, clients, delta)
    assert here > risk
    assert here <= bound(risk, a + 1, b, clients, delta)  # norm of psi_h
    assert here <= bound(risk, a, b + 1, clients, delta)  # complexity of the models
    assert here < bound(risk, a, b, clients, delta / 2)
    assert here >= bound(risk, a, b, Clients(labeled, labeled + rest, m + 1), delta)  # points
    if rest > 21:  # more labels among as many clients
        more = Clients(labeled + 1, labeled + rest, m)
        assert bound(risk, a, b, more, delta) <= here + SLACK
    level = pac_bayes.transductive_bound(risk, a, clients, delta)
    assert level.bound <= risk + pac_bayes.hypernetwork_term(a, clients, delta) + 1e-6


@given(risks, st.integers(1, 300), st.integers(2, 300), deltas)
def test_serflings_bound(risk: float, labeled: int, rest: int, delta: float) -> None:
    clients, more = (Clients(labeled + i, labeled + rest, 1.0) for i in (0, 1))
    here = pac_bayes.serfling_bound(risk, clients, delta)
    assert risk <= here.bound <= here.terms["unlabeled"] + SLACK
    assert pac_bayes.serfling_bound(risk, more, delta).bound <= here.bound
    assert pac_bayes.serfling_bound(risk, clients, delta / 2).bound >= here.bound
    margin = pac_bayes.serfling_margin(labeled, labeled + rest, delta)
    assert margin <= math.sqrt(math.log(1 / delta) / (2 * labeled))  # Hoeffding, with replacement


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=9), st.integers(1, 99))
def test_complexity_grows_with_distances_and_k(distances: list[float], k: int) -> None:
    def c(distances: list[float], k: int, psi_r: float) -> float:
        return pac_bayes.gaussian_complexity(distances, k, 0.1, 0.01, psi_r)

    here = c(distances, k, 1.0)
    assert here < c([*distances, 0.5], k, 1.0)
    assert here < c(distances, k + 1, 1.0)
    assert here < c(distances, k, 1.1)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20))
def test_the_harmonic_mean_is_at_most_the_mean(sizes: list[int]) -> None:
    assert min(sizes) - 1e-9 <= harmonic_mean(sizes) <= sum(sizes) / len(sizes) + 1e-9


@given(st.integers(20, 60), st.floats(0.1, 0.8), st.floats(0.01, 0.1))
def test_more_coverage_needs_larger_sets(clients: int, coverage: float, more: float) -> None:
    draw = np.random.default_rng(clients)
    scores = [draw.random(draw.integers(1, 20)) for _ in range(clients)]
    for threshold in (prediction_sets.split_threshold, prediction_sets.quantile_of_quantiles):
        assert threshold(scores, coverage) <= threshold(scores, coverage + more)
    if clients >= 33:
        floor = prediction_sets.floor_threshold(scores, coverage)
        assert floor >= prediction_sets.split_threshold(scores, coverage)
        covered = [float((own <= floor).mean()) for own in scores]
        assert np.mean(np.array(covered) >= coverage - 0.05 - SLACK) >= 0.97


@given(st.integers(1, 30), st.integers(2, 6), st.integers(0, 99))
def test_own_levels_order_classes_as_probabilities_do(n: int, classes: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    p = draw.dirichlet(np.ones(classes), n).round(draw.integers(1, 9))  # some are equal
    levels = own_thresholds.own_levels(p)
    flat, own = p.reshape(-1), levels.reshape(-1)
    order = np.argsort(-flat, kind="stable")
    assert (np.diff(own[order]) >= -SLACK).all()  # a likelier class comes at a lower level
    same = np.diff(flat[order]) == 0
    assert (np.abs(np.diff(own[order])[same]) == 0).all()
    assert own.min() == 0
    assert own.max() == pytest.approx(p[p > p.min()].sum() / n)
    again = own_thresholds.own_levels(p[::-1])[::-1]  # points in another order
    assert np.allclose(again, levels)
    covered = (levels <= 0.8) * p  # what the model expects of sets at this level
    assert covered.sum() / n >= min(0.8, p.sum() / n) - 1e-9


def test_equal_shares_make_the_weighted_thresholds_those_of_the_split() -> None:
    draw = np.random.default_rng(1)
    labels = [np.array([0, 1, 2]) for _ in range(30)]
    scores = [draw.random(3) for _ in labels]
    weighted = prediction_sets.label_shift_thresholds(scores, labels, [1 / 3] * 3, 0.8)
    assert np.allclose(weighted, prediction_sets.split_threshold(scores, 0.8))


@given(st.integers(1, 4), st.integers(1, 5))
def test_code_lengths_keep_krafts_inequality(points: int, levels: int) -> None:
    """All sequences of so many indices, with all codebooks: the shares have a sum of at most 1."""

    def share(counts: list[int]) -> float:
        sequences = math.factorial(points) / math.prod(map(math.factorial, counts))
        return sequences * 2.0 ** (16 * levels) * math.exp(-compression.code_length(counts))

    assert sum(share(c) for c in compositions(points, levels)) <= 1 / (levels * (levels + 1))


def compositions(total: int, parts: int) -> list[list[int]]:
    if parts == 1:
        return [[total]]
    return [[i, *rest] for i in range(total + 1) for rest in compositions(total - i, parts - 1)]


def test_compression_keeps_what_has_few_values() -> None:
    numbers = np.tile([-1.0, 0.0, 0.5, 2.0], 50)
    code = compression.compress(numbers, 8)
    assert (code.values == numbers).all()
    noisy = numbers + 1e-3 * np.random.default_rng(0).normal(size=numbers.size)
    assert np.abs(compression.compress(noisy, 4).values - noisy).max() < 0.01
    coarse, fine = (compression.compress(noisy, levels).nats for levels in (2, 16))
    assert coarse < fine


REFUSALS = {
    "delta is 0": lambda: mean_error_bound([0.1], 0),
    "delta is 1.5": lambda: pac_bayes.serfling_margin(3, 4, 1.5),
    "losses in [0, 1]: use the share": lambda: mean_error_bound([0.1, 1.2], 0.05),
    "losses lie between nan": lambda: mean_error_bound([0.1, math.nan], 0.05),
    "no losses": lambda: mean_error_bound([], 0.05),
    "at least 20 with and 20 without": lambda: pac_bayes.begin_t(19, 100),
    "90 of 100 clients have labels": lambda: pac_bayes.begin_t(90, 100),
    "first term vanishes": lambda: pac_bayes.begin_t(100, 100),
    "set at least 29 aside": lambda: client_quantile.error_of_share([0.1] * 28, 0.9, 0.05),
    "set at least 9 aside": lambda: prediction_sets.split_threshold([np.ones(3)] * 8, 0.9),
    "19 aside": lambda: prediction_sets.quantile_of_quantiles([np.ones(3)] * 18, 0.9, 0.95),
    "set at least 33 aside": lambda: prediction_sets.floor_threshold([np.ones(3)] * 32, 0.9),
    "need calibration clients": lambda: prediction_sets.split_threshold([], 0.9),
    "coverage is 1.0": lambda: prediction_sets.split_threshold([np.ones(3)] * 8, 1.0),
    "have the sum 1": lambda: prediction_sets.label_shift_thresholds(
        [np.ones(1)], [np.zeros(1, int)], [0.2, 0.3], 0.5
    ),
    "variance is 0": lambda: pac_bayes.gaussian_divergence(1.0, 0.0),
    "complexity is -1": lambda: pac_bayes.models_term(-1.0, Clients(20, 40, 1), 0.05),
    "equal size": lambda: pac_bayes.kl_bound(0.1, 1.0, 1.0, Clients(20, 40, 2.5), 0.05),
    "leave empty ones out": lambda: harmonic_mean([3, 0]),
    "nobody is left to speak of": lambda: pac_bayes.serfling_bound(0.1, Clients(30, 30, 1), 0.05),
    "one-sided DKW": lambda: client_quantile.dkw_margin(10, 0.6),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_what_cannot_be_certified_is_refused(sentence: str) -> None:
    with pytest.raises(CertificateError, match=re.escape(sentence)) as caught:
        REFUSALS[sentence]()
    assert ":" in str(caught.value) or "," in str(caught.value)


def test_29_clients_are_enough_for_nine_in_ten() -> None:
    assert client_quantile.error_of_share([0.1] * 28 + [0.3], 0.9, 0.05) == 0.3
    assert prediction_sets.split_threshold([np.ones(3)] * 9, 0.9) == 1


@given(risks, st.floats(0, 0.3), st.floats(0, 30), st.integers(20, 200), st.integers(20, 200))
def test_the_bound_on_unlabeled_clients_grows_with_the_risk_of_labeled_ones(
    risk: float, more: float, divergence: float, labeled: int, rest: int
) -> None:
    clients = Clients(labeled, labeled + rest, 1.0)
    a, b = (
        pac_bayes.transductive_bound(r, divergence, clients, 0.1).terms["unlabeled"]
        for r in (risk, risk + more)
    )
    assert risk - 1e-9 <= a <= b + 1e-9
