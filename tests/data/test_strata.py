"""Every set of classes and every rotation equally often."""

from collections import Counter
from itertools import combinations, product
from math import comb

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowdup.data.strata import stratify
from flowdup.random import Stream


def spread(found: Counter[object], of: list[object]) -> int:
    """The most minus the least often that one of these occurs."""
    times = [found[one] for one in of]
    return max(times) - min(times)


@given(
    st.integers(1, 120),
    st.integers(0, 4),
    st.integers(4, 7),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_sets_classes_rotations_and_both_together_occur_equally_often_up_to_one(
    clients: int, per_client: int, classes: int, rotations: int, seed: int
) -> None:
    sets, turns = stratify(clients, per_client, classes, rotations, Stream(seed))
    assert sets.shape == (clients, per_client) and turns.shape == (clients,)
    rows, every = [tuple(row) for row in sets.tolist()], [*combinations(range(classes), per_client)]
    assert spread(Counter(rows), [*every]) <= 1
    assert spread(Counter(turns.tolist()), [*range(rotations)]) <= 1
    both = Counter(zip(rows, turns.tolist(), strict=True))
    assert spread(Counter(both), [*product(every, range(rotations))]) <= 1
    if per_client:
        used = np.bincount(sets.reshape(-1), minlength=classes)
        assert used.max() - used.min() <= 1


def test_fifty_clients_have_all_pairs_of_ten_classes_and_five_of_them_twice() -> None:
    for seed in range(20):
        sets, _ = stratify(50, 2, 10, 1, Stream(seed))
        times = Counter(map(tuple, sets.tolist()))
        assert sorted(times.values()) == [1] * 40 + [2] * 5
        assert np.bincount(sets.reshape(-1)).tolist() == [10] * 10


def test_a_seed_gives_an_order_and_another_seed_another() -> None:
    (a, turn), (b, same), (c, other) = (stratify(45, 2, 10, 4, Stream(s)) for s in (0, 0, 1))
    assert a.tolist() == b.tolist() != c.tolist()
    assert turn.tolist() == same.tolist() != other.tolist()
    assert sorted(a.tolist()) == sorted(c.tolist()) != a.tolist()


def test_the_sets_that_occur_once_more_differ_by_seed() -> None:
    found = set()
    for seed in range(30):
        sets, _ = stratify(3, 2, 4, 1, Stream(seed))
        found |= set(map(tuple, sets.tolist()))
    assert len(found) == comb(4, 2)
