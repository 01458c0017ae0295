"""Each route on tasks whose true risk is known: 200 draws fail in at most a delta share, and the
same experiment catches a version that was broken on purpose.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate

import numpy as np
import pytest
from numpy.random import Generator, default_rng

from flowdup.certificate import pac_bayes
from flowdup.certificate.client_quantile import binomial_tail, error_of_share, share_curve
from flowdup.certificate.held_out_clients import mean_error_bound
from flowdup.certificate.kl import monte_carlo_bound
from flowdup.certificate.own_thresholds import FittedLevels, own_levels, own_sets
from flowdup.certificate.pac_bayes import Clients
from flowdup.certificate.prediction_sets import (
    SetThresholds,
    floor_threshold,
    label_scores,
    label_shift_thresholds,
    make_sets,
    probability_scores,
    quantile_of_quantiles,
    split_threshold,
)

MakeScores = Callable[[np.ndarray], np.ndarray]
Threshold = Callable[[Sequence[np.ndarray], float], float]
DRAWS = 200
DELTA = 0.1
SURE = 1e-4  # the chance that a right bound is called wrong


def fails_too_often(failures: Sequence[bool], delta: float = DELTA) -> bool:
    """Whether so many failures would be a wonder if each had the chance delta."""
    return binomial_tail(sum(failures), len(failures), delta) < SURE


def experiment(one: Callable[[Generator], bool]) -> list[bool]:
    """Whether the bound failed, in independent draws."""
    return [one(default_rng([17, number])) for number in range(DRAWS)]


def test_held_out_clients_and_a_reuse_of_them() -> None:
    """Errors are 0 or 1, the worst case; reusing clients to choose among 20 models breaks it."""

    def fails(draw: Generator, models: int) -> bool:
        errors = (draw.random((models, 40)) < 0.3).astype(float)
        best = min(errors, key=sum)
        return mean_error_bound(best.tolist(), DELTA) < 0.3

    assert not fails_too_often(experiment(lambda draw: fails(draw, 1)))
    assert fails_too_often(experiment(lambda draw: fails(draw, 20)))


def test_client_quantiles_and_a_reuse_of_clients() -> None:
    """A client's error is uniform on [0, 1], so the share of clients with at most e is e."""

    def fails(draw: Generator, models: int) -> bool:
        errors = min(draw.random((models, 60)), key=lambda e: np.sort(e)[53])
        return error_of_share(errors.tolist(), 0.8, DELTA) < 0.8

    def curve_fails(draw: Generator, margin: float) -> bool:
        curve = share_curve(draw.random(25).tolist(), DELTA)
        return any(point.share_at_once + margin > point.error for point in curve)

    assert not fails_too_often(experiment(lambda draw: fails(draw, 1)))
    assert fails_too_often(experiment(lambda draw: fails(draw, 10)))
    assert not fails_too_often(experiment(lambda draw: curve_fails(draw, 0.0)))
    assert fails_too_often(experiment(lambda draw: curve_fails(draw, 0.1)))


def unequal_clients(draw: Generator, clients: int) -> list[np.ndarray]:
    """Scores of clients that differ: the hard ones have few points."""
    hard = draw.random(clients) < 0.3
    return [draw.random(3 if h else 60) + (1.0 if h else 0.0) for h in hard]


def test_split_sets_count_clients_and_not_points() -> None:
    """Coverage is an average over draws of all clients, so it is the mean that is tested."""

    def misses(draw: Generator, pooled: bool) -> float:
        *calibration, new = unequal_clients(draw, 41)
        if pooled:
            threshold = float(np.quantile(np.concatenate(calibration), 0.8))
        else:
            threshold = split_threshold(calibration, 0.8)
        return float((new > threshold).mean())

    def covers(pooled: bool) -> bool:
        found = [misses(default_rng([3, i]), pooled) for i in range(DRAWS)]
        return float(np.mean(found)) <= 0.2 + 3 * float(np.std(found)) / math.sqrt(DRAWS)

    assert covers(pooled=False)
    assert not covers(pooled=True)


def test_sets_that_were_calibrated_on_what_they_were_fitted_to_miss() -> None:
    """A model that has seen the calibration clients scores them better than new ones."""

    def misses(draw: Generator, reused: bool) -> bool:
        *calibration, new = draw.random((41, 30))
        seen = [own * 0.8 for own in calibration] if reused else list(calibration)
        return bool(draw.choice(new) > split_threshold(seen, 0.9))

    assert not fails_too_often(experiment(lambda draw: misses(draw, False)))
    assert fails_too_often(experiment(lambda draw: misses(draw, True)))


def test_quantiles_of_quantiles_hold_for_a_share_of_clients() -> None:
    """A new client has 80 % of its own points covered, in 90 % of the draws."""

    def fails(draw: Generator, reused: bool) -> bool:
        level = draw.random(40)
        *calibration, new = draw.random((40, 25)) + level[:, None]
        seen = [own - 0.3 for own in calibration] if reused else list(calibration)
        return bool((new <= quantile_of_quantiles(seen, 0.8, 0.9)).mean() < 0.8)

    assert not fails_too_often(experiment(lambda draw: fails(draw, False)))
    assert fails_too_often(experiment(lambda draw: fails(draw, True)))


def sure_and_unsure_clients(
    draw: Generator, clients: int, points: int = 40
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Probabilities that are right about labels; clients differ in how sure they are."""
    found = []
    for sharpness in draw.uniform(0.2, 6, clients):
        logits = sharpness * draw.normal(size=(points, 5))
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        found.append((p, (p.cumsum(1) < draw.random((points, 1))).sum(1).clip(max=4)))
    return found


def test_levels_of_a_clients_own_cover_unsure_clients_as_well() -> None:
    """On average as they say, and better at the clients that fare worst; not if the model has seen
    the labels of some calibration points.
    """

    def covered(draw: Generator, make: Callable[[np.ndarray], np.ndarray], reused: bool) -> float:
        *calibration, (p, y) = sure_and_unsure_clients(draw, 41)
        if reused:
            half = [np.where(draw.random(40) < 0.5, p.argmax(1), y) for p, y in calibration]
            calibration = [(p, y) for (p, _), y in zip(calibration, half, strict=True)]
        threshold = split_threshold([label_scores(make(q), z) for q, z in calibration], 0.8)
        return float(label_scores(make_sets(make(p), threshold), y).mean())

    def experiments(make: Callable[[np.ndarray], np.ndarray], reused: bool = False) -> np.ndarray:
        return np.array([covered(default_rng([9, i]), make, reused) for i in range(DRAWS)])

    def too_low(values: np.ndarray) -> bool:
        return bool(values.mean() < 0.8 - 3 * values.std() / math.sqrt(DRAWS))

    own, plain = experiments(own_levels), experiments(probability_scores)
    assert not too_low(own) and not too_low(plain)
    assert too_low(experiments(own_levels, reused=True))
    worst = [np.sort(values)[: DRAWS // 10].mean() for values in (own, plain)]
    assert worst[0] > worst[1] + 0.05


@pytest.mark.parametrize("points", [1, 2, 5, 100])
def test_clients_with_few_points_are_covered_by_levels_of_clients_with_many(points: int) -> None:
    """Of which nothing is promised: their levels must err on the safe side, and no set that a
    client makes of its own points alone may be empty at all of them.
    """
    draw = default_rng(3)
    calibration = sure_and_unsure_clients(draw, 100, 100)
    levels = SetThresholds.of([label_scores(own_levels(p), y) for p, y in calibration])
    new = sure_and_unsure_clients(draw, max(2000 // points, 200), points)
    for coverage in (0.5, 0.8, 0.9):
        sets = [probability_scores(p) <= own_sets(levels, p).find(coverage) for p, _ in new]
        covered = [label_scores(s, y).mean() for s, (_, y) in zip(sets, new, strict=True)]
        assert np.mean(covered) >= coverage - 0.03
        assert all(s.any() for s in sets)


def too_sure_clients(draw: Generator, clients: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Small clients, whose models are much too sure of themselves, and large ones."""
    found = []
    for n in draw.choice([10, 80], clients):
        logits = 2 * draw.normal(size=(n, 5))
        p, q = (np.exp(s * logits) / np.exp(s * logits).sum(1, keepdims=True) for s in (1, 2))
        y = (p.cumsum(1) < draw.random((n, 1))).sum(1).clip(max=4)
        found.append((p if n == 80 else q, y))
    return found


def test_what_other_clients_teach_about_thresholds_keeps_coverage_and_a_floor() -> None:
    """Fitted to 40 clients, calibrated on 35 others: 80 % on average, 75 % at 97 % of clients, and
    small clients fare better than without; calibrated on points that the model has seen, neither.
    """
    teachers = too_sure_clients(default_rng(1), 40)
    fitted = FittedLevels.fit([p for p, _ in teachers], [y for _, y in teachers], 0.8)

    def coverages(draw: Generator) -> tuple[float, ...]:
        clients = too_sure_clients(draw, 36)
        makers: tuple[MakeScores, ...] = (own_levels, fitted.scores)
        tables = {make: [make(p) for p, _ in clients] for make in makers}
        seen = [np.where(draw.random(len(y)) < 0.5, p.argmax(1), y) for p, y in clients]
        labels = [y for _, y in clients]

        def covered(make: MakeScores, threshold: Threshold, labels: list[np.ndarray]) -> float:
            *calibration, new = tables[make]
            pairs = zip(calibration, labels, strict=False)
            limit = threshold([label_scores(scores, y) for scores, y in pairs], 0.8)
            return float(label_scores(make_sets(new, limit), clients[-1][1]).mean())

        return (
            len(clients[-1][1]),
            covered(own_levels, split_threshold, labels),
            covered(fitted.scores, split_threshold, labels),
            covered(fitted.scores, floor_threshold, labels),
            covered(fitted.scores, floor_threshold, seen),
        )

    found = np.array([coverages(default_rng([11, i])) for i in range(DRAWS)])
    points, own, better, floor, reused = found.T
    for values in (own, better, floor):
        assert values.mean() >= 0.8 - 3 * values.std() / math.sqrt(DRAWS)
    assert not fails_too_often((floor < 0.75).tolist(), 0.03)
    assert fails_too_often((reused < 0.75).tolist(), 0.03)
    assert better[points == 10].mean() > own[points == 10].mean() + 0.03


def test_weights_by_label_shares_mend_a_label_shift() -> None:
    """Class 1 is hard and rare at calibration clients, frequent at the new one."""

    def client(draw: Generator, share: float, points: int) -> tuple[np.ndarray, np.ndarray]:
        y = (draw.random(points) < share).astype(np.int64)
        right = np.where(y == 0, 0.7 + 0.3 * draw.random(points), draw.random(points))
        return np.stack(
            [np.where(y == 0, right, 1 - right), np.where(y == 1, right, 1 - right)], 1
        ), y

    def misses(draw: Generator, weighted: bool) -> float:
        found = [client(draw, 0.1, 30) for _ in range(60)]
        scores, labels = [label_scores(1 - p, y) for p, y in found], [y for _, y in found]
        p, y = client(draw, 0.8, 50)
        threshold: float | np.ndarray = split_threshold(scores, 0.9)
        if weighted:
            threshold = label_shift_thresholds(scores, labels, [0.2, 0.8], 0.9)
        return 1 - float(make_sets(1 - p, threshold)[np.arange(len(y)), y].mean())

    rate = {
        w: float(np.mean([misses(default_rng([5, i]), w) for i in range(DRAWS)]))
        for w in (False, True)
    }
    assert rate[True] < 0.1 + 0.01
    assert rate[False] > 0.2


def overfitted_sample(draw: Generator, labeled: int, hypotheses: float) -> float:
    """The labeled clients' mean loss of the best of so many hypotheses, each of which is wrong at
    one half of all clients: the least of that many hypergeometric draws, by its distribution.
    """
    share = -math.expm1(math.log1p(-draw.random()) / hypotheses)  # quantile of the minimum
    return bisect_right(chances_of_wrong(2 * labeled, labeled), share) / labeled


def test_the_transductive_bound_and_half_of_its_complexity() -> None:
    """The hypernetwork is chosen among 10^18 by labeled clients; the true mean is 1/2 for each."""
    clients, divergence = Clients(300, 600, 1.0), math.log(1e18)

    def fails(draw: Generator, share: float, root: bool) -> bool:
        risk = overfitted_sample(draw, 300, 1e18)
        if root:
            return risk + pac_bayes.hypernetwork_term(share * divergence, clients, DELTA) < 0.5
        return pac_bayes.transductive_bound(risk, share * divergence, clients, DELTA).bound < 0.5

    for root in (False, True):
        assert not fails_too_often(experiment(partial(fails, share=1.0, root=root)))
        assert fails_too_often(experiment(partial(fails, share=0.5, root=root)))


def test_the_inductive_bound_and_half_of_its_complexity() -> None:
    """As above with independent clients: the least of 10^9 binomials."""
    n = 60
    ways = np.cumsum([math.comb(n, k) / 2**n for k in range(n + 1)])

    def fails(draw: Generator, share: float) -> bool:
        least = -math.expm1(math.log1p(-draw.random()) / 1e9)
        risk = int(np.searchsorted(ways, least)) / n
        return pac_bayes.inductive_bound(risk, share * math.log(1e9), n, DELTA).bound < 0.5

    assert not fails_too_often(experiment(lambda draw: fails(draw, 1.0)))
    assert fails_too_often(experiment(lambda draw: fails(draw, 0.5)))


def test_theorem_1_and_half_of_its_complexity() -> None:
    """Every client has one point z = +-1 and the model v = c z, which it remembers: the loss
    P(f z < 0) with f ~ N(v, alpha) is Phi(-u), u = |c| / sqrt(alpha), and the true risk is 1/2.
    A few clients, drawn at random, have v = 0.
    """
    n, labeled, u, alpha = 200_000, 100_000, 0.5, 0.01
    clients = Clients(labeled, n, 1.0)
    wrong = 0.5 * math.erfc(u / math.sqrt(2))

    def fails(draw: Generator, share: float, root: bool) -> bool:
        idle = draw.binomial(n, 0.01)
        idle_labeled = draw.hypergeometric(idle, n - idle, labeled)
        risk = (idle_labeled * 0.5 + (labeled - idle_labeled) * wrong) / labeled
        distance = (n - idle) * u**2 * alpha
        # C by its formula: the noise n k alpha_r / (2 alpha_theta) is below 1 nat here
        c = share * pac_bayes.gaussian_complexity([distance], 1, alpha, alpha / n, 0.0)
        if not root:
            return pac_bayes.kl_bound(risk, 0.0, c, clients, DELTA).bound < 0.5
        return pac_bayes.theorem_1(risk, 0.0, 1.0, [c], clients, DELTA).bound < 0.5

    for root in (True, False):
        assert not fails_too_often(experiment(partial(fails, share=1.0, root=root)))
        assert fails_too_often(experiment(partial(fails, share=0.5, root=root)))


def test_serflings_margin_and_one_without_its_root() -> None:
    """One predictor that is wrong at a half of 80 clients, 40 of whom are seen."""

    def fails(draw: Generator, factor: float) -> bool:
        seen = draw.hypergeometric(40, 40, 40) / 40
        return bool(seen + factor * pac_bayes.serfling_margin(40, 80, DELTA) < 0.5)

    assert not fails_too_often(experiment(lambda draw: fails(draw, 1.0)))
    assert fails_too_often(experiment(lambda draw: fails(draw, 0.3)))


def test_a_learned_prior_and_one_that_is_judged_by_whom_it_knew() -> None:
    """80 of 300 clients choose among 10^15 hypotheses, each of which is wrong at half of all; 60
    more judge what was chosen, for the other 160.  With the first 80 among the judges it is caught.
    """

    def fails(draw: Generator, knew: bool, serfling: bool) -> bool:
        least = -math.expm1(math.log1p(-draw.random()) / 1e15)
        known = bisect_right(chances_of_wrong(300, 80), least)
        judges = draw.hypergeometric(150 - known, 70 + known, 60)
        rest = (150 - known - judges) / 160
        risk, clients = judges / 60, Clients(60, 220, 1.0)
        if knew:
            risk, clients = (known + judges) / 140, Clients(140, 300, 1.0)
        if serfling:
            return pac_bayes.serfling_bound(risk, clients, DELTA).terms["unlabeled"] < rest
        return pac_bayes.transductive_bound(risk, 0.0, clients, DELTA).terms["unlabeled"] < rest

    for serfling in (True, False):
        assert not fails_too_often(experiment(partial(fails, knew=False, serfling=serfling)))
        assert fails_too_often(experiment(partial(fails, knew=True, serfling=serfling)))


@cache
def chances_of_wrong(clients: int, drawn: int) -> list[float]:
    """P(at most k of the drawn are among the wrong half of all)."""
    half = clients // 2
    ways = accumulate(math.comb(half, k) * math.comb(half, drawn - k) for k in range(drawn + 1))
    return [way / math.comb(clients, drawn) for way in ways]


def test_the_monte_carlo_term_and_none() -> None:
    """The risk of a stochastic predictor from 50 samples of it."""

    def fails(draw: Generator, bounded: bool) -> bool:
        losses = (draw.random(50) < 0.2).astype(float).tolist()
        return (monte_carlo_bound(losses, DELTA) if bounded else sum(losses) / 50) < 0.2

    assert not fails_too_often(experiment(lambda draw: fails(draw, True)))
    assert fails_too_often(experiment(lambda draw: fails(draw, False)))
