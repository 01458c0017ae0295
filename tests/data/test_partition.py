from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowdup.data import DataConfig, load_population
from flowdup.data.clients import ClientData
from flowdup.data.partition import Recipe, make_clients
from flowdup.errors import ConfigError
from flowdup.random import Stream

Y = torch.arange(1000) % 10
X = torch.arange(1000).to(torch.int32).reshape(-1, 1, 1, 1).expand(-1, 1, 3, 3).clone()
X[:, 0, 0, 1] = -1  # a mark that shows the rotation


def make(recipe: Recipe, clients: int, seed: int = 0) -> list[ClientData]:
    return make_clients(recipe, X, Y, clients, Stream(seed).child("group"))


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
        make_clients(Recipe(5, 0, (90,)), oblong, Y[:10], 1, Stream(0).child("x"))
    assert make_clients(Recipe(5, 0, (180,)), oblong, Y[:10], 1, Stream(0).child("x"))


DIGITS = DataConfig(
    points=20, overlap=True, train_clients=40, validation_clients=10, test_clients=10
)


def images(clients: list[ClientData]) -> set[bytes]:
    return {x.numpy().tobytes() for c in clients for x in c.x}


def test_groups_of_clients_share_no_image() -> None:
    found = load_population(DIGITS, Stream(0))
    groups = [images(list(g)) for g in (found.train, found.validation, found.test)]
    assert [len(g) for g in (found.train, found.validation, found.test)] == [40, 10, 10]
    assert not groups[0] & groups[1] and not groups[0] & groups[2] and not groups[1] & groups[2]


@pytest.mark.parametrize(("share", "labeled"), [(0.05, 2), (0.5, 20), (1.0, 40), (0.0, 0)])
def test_a_share_p_of_the_training_clients_keeps_its_labels(share: float, labeled: int) -> None:
    found = load_population(replace(DIGITS, labeled_fraction=share), Stream(0))
    assert sum(c.labeled for c in found.train) == labeled
    assert all(c.y is None for c in found.train if not c.labeled)
    assert all(c.labeled for c in [*found.validation, *found.test])


def test_pools_have_all_classes_in_proportion() -> None:
    """Else the rarest class of a small pool could not serve all clients that draw it."""
    config = replace(DIGITS, points=40, classes_per_client=2, validation_clients=10)
    for seed in range(5):
        found = load_population(config, Stream(seed))
        labels = np.concatenate([c.y for c in found.validation if c.y is not None])
        assert set(np.bincount(labels, minlength=10)) == {40}


def test_without_overlap_all_images_are_dealt_out() -> None:
    config = DataConfig(points=13, validation_clients=10, test_clients=10)
    found = load_population(config, Stream(0))
    assert len(found.train) == 90
    assert len(images(list(found.train))) <= 90 * 13


def test_unknown_sources_and_shares_are_refused() -> None:
    with pytest.raises(ConfigError, match="use one of digits, mnist"):
        load_population(DataConfig("imagenet"), Stream(0))
    with pytest.raises(ConfigError, match="between 0 and 1"):
        load_population(DataConfig(labeled_fraction=1.5), Stream(0))
    with pytest.raises(ConfigError, match="no training client"):
        load_population(DataConfig(points=1000), Stream(0))
