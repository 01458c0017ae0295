"""Dirichlet label shares: the law, and that it is the same on every machine."""

from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdup.data.class_shares import draw_class_counts
from flowdup.random import Stream

PLENTY = [1000] * 10
EVERY = range(10)


def words(points: int, seed: int = 0) -> list[int]:
    found: list[int] = Stream(seed).words(points).tolist()
    return found


@given(
    st.integers(1, 60),
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.sampled_from([1e-300, 0.01, 0.1, 0.5, 1.0, 1e30]),
    st.integers(0, 99),
)
def test_exactly_so_many_points_none_that_is_not_left_and_others_only_where_own_are_used_up(
    points: int, left: list[int], own: set[int], concentration: float, seed: int
) -> None:
    points = min(points, sum(left))
    mine = [c for c in sorted(own) if c < len(left)]
    counts = draw_class_counts(words(points, seed), mine, left, concentration)
    assert sum(counts) == points
    assert all(0 <= n <= m for n, m in zip(counts, left, strict=True))
    if any(n for c, n in enumerate(counts) if c not in mine):
        assert all(counts[c] == left[c] for c in mine)


@pytest.mark.parametrize("concentration", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("own", [EVERY, (2, 7), (0, 4, 9)])
def test_counts_have_the_mean_and_the_variance_of_dirichlet_shares(
    own: tuple[int, ...], concentration: float
) -> None:
    """Dirichlet-multinomial: n p and n p (1 - p) (n + a) / (1 + a), a the sum of concentrations."""
    n, p, a = 40, 1 / len(own), concentration * len(own)
    drawn = Stream(1).substreams(0, 4000, n).tolist()
    counts = np.array([draw_class_counts(w, own, PLENTY, concentration) for w in drawn])[:, own]
    variance = n * p * (1 - p) * (n + a) / (1 + a)
    assert counts.mean(0) == pytest.approx(n * p, abs=4 * np.sqrt(variance / 4000))
    assert counts.var(0) == pytest.approx(variance, rel=0.15)


def test_what_is_left_of_the_shares_has_the_law_of_shares_that_never_had_the_class() -> None:
    """A class without points takes nothing away from how unequal the others are."""
    drawn = Stream(2).substreams(0, 4000, 30).tolist()
    left = [2, 1000, 1000]
    counts = np.array([draw_class_counts(w, range(3), left, 0.5) for w in drawn])
    emptied = counts[counts[:, 0] == 2]
    assert 1000 < len(emptied) < 4000
    n, a = 28, 1.0
    assert emptied[:, 1].mean() == pytest.approx(n / 2, rel=0.05)
    assert emptied[:, 1].var() == pytest.approx(n / 4 * (n + a) / (1 + a), rel=0.15)


def test_a_vanishing_concentration_leaves_one_class_and_a_vast_one_equal_shares() -> None:
    for seed in range(20):
        assert max(draw_class_counts(words(100, seed), EVERY, PLENTY, 1e-300)) == 100
        assert max(draw_class_counts(words(1000, seed), EVERY, PLENTY, 1e30)) < 150


def test_counts_are_the_same_for_ever() -> None:
    assert draw_class_counts(words(100), EVERY, PLENTY, 0.1) == [0, 1, 0, 0, 0, 0, 3, 1, 90, 5]
    assert draw_class_counts(words(100), (3, 5), PLENTY, 1.0) == [0, 0, 0, 5, 0, 95, 0, 0, 0, 0]


@pytest.mark.parametrize("concentration", [0.1, 0.5, 0.3])
def test_counts_are_those_of_exact_arithmetic(concentration: float) -> None:
    """Floats are rounded the same way everywhere, and so little that no draw of these feels it."""
    for seed in range(20):
        counts = [Fraction(0)] * 10
        for word in words(60, seed):
            sums = list(accumulate(Fraction(concentration) + n for n in counts))
            place = Fraction(word, 2**32) * sums[-1]
            counts[next(c for c in EVERY if place < sums[c])] += 1
        assert draw_class_counts(words(60, seed), EVERY, PLENTY, concentration) == counts
