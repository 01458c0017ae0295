import tracemalloc
from collections import Counter
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowdup.data.clients import ClientData
from flowdup.data.partition import Recipe, make_clients
from flowdup.errors import ConfigError
from flowdup.random import Stream

Y = torch.arange(1000) % 10
X = torch.arange(1000).to(torch.int32).reshape(-1, 1, 1, 1).expand(-1, 1, 3, 3).clone()
X[:, 0, 0, 1] = -1  # a mark that shows the rotation


def make(recipe: Recipe, clients: int, seed: int = 0) -> list[ClientData]:
    return make_clients(recipe, X, Y, torch.arange(len(Y)), clients, Stream(seed).child("group"))


def numbers(client: ClientData) -> list[int]:
    """Which points of X a client holds."""
    found: list[int] = client.x[:, 0, 1, 1].tolist()
    return found


@given(st.integers(1, 10), st.integers(1, 100), st.integers(0, 99))
def test_clients_of_a_partition_share_no_point(clients: int, points: int, seed: int) -> None:
    made = make(Recipe(points), clients, seed)
    held = [n for c in made for n in numbers(c)]
    assert len(held) == clients * points == len(set(held))


@given(st.integers(1, 5), st.integers(1, 20), st.booleans(), st.integers(0, 99))
def test_clients_have_as_many_classes_as_told_in_equal_parts(
    classes: int, clients: int, overlap: bool, seed: int
) -> None:
    made = make(Recipe(10 * classes, classes, (), overlap), clients, seed)
    for c in made:
        assert c.y is not None
        assert (c.y == Y[numbers(c)]).all()
        assert sorted(np.unique(c.y, return_counts=True)[1].tolist()) == [10] * classes
    held = [n for c in made for n in numbers(c)]
    assert overlap or len(held) == len(set(held))


def test_every_class_is_used_equally_often_and_pairs_vary() -> None:
    made = make(Recipe(20, 2), 50)
    labels = torch.cat([c.y for c in made if c.y is not None])
    assert labels.bincount().tolist() == [100] * 10
    assert len({c.traits["classes"] for c in made}) > 20


def test_all_of_a_clients_images_are_turned_the_same_way() -> None:
    made = make(Recipe(10, 0, (0, 90, 180, 270)), 100)
    where = {0: (0, 1), 90: (1, 0), 180: (2, 1), 270: (1, 2)}  # counter-clockwise
    for c in made:
        row, column = where[int(c.traits["rotation"])]
        assert (c.x[:, 0, row, column] == -1).all()
    counts = np.bincount([int(c.traits["rotation"]) // 90 for c in made])
    assert counts.min() > 10


def test_the_same_seed_makes_the_same_clients() -> None:
    recipe = Recipe(10, 2, (0, 90), True)
    a, b, c = make(recipe, 9), make(recipe, 9), make(recipe, 9, 1)
    assert [numbers(x) for x in a] == [numbers(x) for x in b] != [numbers(x) for x in c]
    assert [x.traits for x in a] == [x.traits for x in b]


@pytest.mark.parametrize(
    ("recipe", "clients", "message"),
    [
        (Recipe(101), 10, "data.overlap"),
        (Recipe(1001, 0, (), True), 1, "only 1000 are at hand"),
        (Recipe(25, 2), 1, "divide"),
        (Recipe(110, 11), 1, "at most 10"),
        (Recipe(110, 11, (), False, 0.5), 1, "at most 10"),
        (Recipe(101, 0, (), False, 0.1), 10, "data.overlap"),
        (Recipe(1001, 0, (), True, 0.1), 1, "only 1000 are at hand"),
        (Recipe(10, 0, (45,)), 1, "multiples of 90"),
    ],
)
def test_what_cannot_be_made_is_refused(recipe: Recipe, clients: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(recipe, clients)


def test_oblong_images_turn_by_180_degrees_only() -> None:
    oblong = torch.zeros(10, 1, 2, 3)
    with pytest.raises(ConfigError, match="180 degrees only"):
        make_clients(Recipe(5, 0, (90,)), oblong, Y[:10], torch.arange(10), 1, Stream(0).child("x"))
    assert make_clients(
        Recipe(5, 0, (180,)), oblong, Y[:10], torch.arange(10), 1, Stream(0).child("x")
    )


def test_overlapping_clients_have_one_lane_each_and_are_drawn_one_at_a_time() -> None:
    y = torch.zeros(20_000, dtype=torch.int64)
    x = torch.arange(20_000).reshape(-1, 1, 1, 1)
    stream = Stream(0).child("group")
    tracemalloc.start()
    made = make_clients(Recipe(10, overlap=True), x, y, torch.arange(len(y)), 50, stream)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    lanes = stream.child("points").substreams(0, 50, 20_000)
    chosen = np.argsort(lanes, axis=1, kind="stable")[:, :10]
    assert [c.x.flatten().tolist() for c in made] == chosen.tolist()
    assert peak < 3 * 2**20  # all 50 lanes at once take 27 MiB


@given(st.integers(0, 2), st.booleans())
def test_no_clients_are_made_of_no_images(classes: int, overlap: bool) -> None:
    assert (
        make_clients(
            Recipe(20, classes, (0, 90), overlap), X[:0], Y[:0], torch.arange(0), 0, Stream(0)
        )
        == []
    )


def label_counts(client: ClientData) -> list[int]:
    assert client.y is not None and (client.y == Y[numbers(client)]).all()
    return client.y.bincount(minlength=10).tolist()


@given(
    st.integers(1, 20),
    st.integers(1, 50),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([1e-9, 0.1, 0.5, 100.0]),
    st.integers(0, 99),
)
def test_unequal_shares_leave_clients_their_points_and_disjoint(
    clients: int, points: int, classes: int, overlap: bool, dirichlet: float, seed: int
) -> None:
    """As many clients as with equal shares: all 1000 points, if need be."""
    made = make(Recipe(points, classes, (), overlap, dirichlet), clients, seed)
    assert len(made) == clients
    for c in made:
        counts = label_counts(c)
        assert sum(counts) == len(c) == points == len(set(numbers(c)))
        assert c.traits["main_class"] == counts.index(max(counts))
    held = [n for c in made for n in numbers(c)]
    assert overlap or len(held) == len(set(held))


def test_all_points_are_dealt_out_with_unequal_shares_too() -> None:
    for classes in (0, 2):
        made = make(Recipe(50, classes, (), False, 0.1), 20)
        assert sorted(n for c in made for n in numbers(c)) == list(range(1000))


def test_unequal_shares_are_of_the_same_classes_as_equal_ones() -> None:
    even, uneven = (make(Recipe(20, 2, (), True, d), 200) for d in (0.0, 1.0))
    shares = []
    for a, b in zip(even, uneven, strict=True):
        assert set(str(b.traits["classes"]).split("+")) <= set(str(a.traits["classes"]).split("+"))
        shares.append(max(label_counts(b)) / 20)
    assert 0.7 < np.mean(shares) < 0.8  # of two uniform shares the larger is 3/4 on average


def test_the_smaller_the_concentration_the_fewer_classes_make_up_a_client() -> None:
    means = []
    for dirichlet in (0.02, 0.1, 0.5, 100.0):
        made = make(Recipe(50, 0, (), True, dirichlet), 100)
        means.append(np.mean([max(label_counts(c)) for c in made]) / 50)
    assert means[0] > 0.85 > means[1] > 0.6 > means[2] > 0.35 and means[3] < 0.25


@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_seed_makes_the_same_unequal_clients(overlap: bool) -> None:
    recipe = Recipe(10, 2, (0, 90), overlap, 0.5)
    a, b, c = make(recipe, 9), make(recipe, 9), make(recipe, 9, 1)
    assert [numbers(x) for x in a] == [numbers(x) for x in b] != [numbers(x) for x in c]
    assert [x.traits for x in a] == [x.traits for x in b]
    fewer = make(recipe, 5)  # the first ones do not hang on those that come later
    assert [numbers(x) for x in fewer] == [numbers(x) for x in a[:5]]


@pytest.mark.parametrize("dirichlet", [0.0, 0.5])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stratified", [False, True])
def test_both_shifts_at_once(dirichlet: float, overlap: bool, stratified: bool) -> None:
    recipe = Recipe(20, 2, (0, 90, 180, 270), overlap, dirichlet)
    pool = torch.arange(len(Y))
    made = make_clients(recipe, X, Y, pool, 40, Stream(0).child("group"), stratified)
    where = {0: (0, 1), 90: (1, 0), 180: (2, 1), 270: (1, 2)}  # counter-clockwise
    for c in made:
        row, column = where[int(c.traits["rotation"])]
        assert (c.x[:, 0, row, column] == -1).all()
        there = [str(label) for label, n in enumerate(label_counts(c)) if n]
        assert c.traits["classes"] == "+".join(there) and len(there) <= 2
        assert dirichlet or len(there) == 2
    kinds = Counter(c.traits["rotation"] for c in made)
    assert len(kinds) == 4 and (not stratified or set(kinds.values()) == {10})


@given(st.integers(0, 4), st.integers(1, 50), st.booleans(), st.integers(0, 99))
def test_stratified_clients_have_every_set_of_classes_and_rotation_equally_often(
    classes: int, clients: int, overlap: bool, seed: int
) -> None:
    recipe = Recipe(4 * (classes or 1), classes, (0, 180), overlap)
    stream, pool = Stream(seed).child("group"), torch.arange(len(Y))
    made = make_clients(recipe, X, Y, pool, clients, stream, stratified=True)
    turns = Counter(c.traits["rotation"] for c in made)
    assert abs(turns[0] - turns[180]) <= 1
    sets = Counter(c.traits["classes"] for c in made) if classes else Counter([""] * clients)
    possible = comb(10, classes)
    assert len(sets) == min(possible, clients) and max(sets.values()) == -(-clients // possible)
    used = np.sum([np.array(label_counts(c)) > 0 for c in made], 0)
    assert not classes or used.max() - used.min() <= 1
    held = [n for c in made for n in numbers(c)]
    assert overlap or len(held) == len(set(held))
