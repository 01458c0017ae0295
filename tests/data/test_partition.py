import tracemalloc

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
