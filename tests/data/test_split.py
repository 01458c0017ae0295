"""A user's clients are dealt out so that every group has some with labels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowdup.data import ClientData, DataConfig, load_population
from flowdup.data.population import Population
from flowdup.data.split import share_labels, split_clients
from flowdup.random import Stream


def write_clients(folder: Path, clients: int, labeled: int) -> DataConfig:
    """The first ones have labels."""
    folder.mkdir()
    for number in range(clients):
        x = np.random.default_rng(number).normal(size=(6, 2)).astype(np.float32)
        y: dict[str, Any] = {"y": np.arange(6) % 3} if number < labeled else {}
        np.savez(folder / f"c{number:02}.npz", x=x, **y)
    return DataConfig("folder", path=str(folder), classes=3, validation_clients=6, test_clients=6)


def labels(found: Population) -> list[int]:
    """How many clients have some, in training, validation and test."""
    return [sum(c.labeled for c in group) for group in (found.train, found.validation, found.test)]


@pytest.mark.parametrize(
    ("labeled", "shares"),
    [
        (0, [0, 0, 0]),
        (1, [1, 0, 0]),
        (2, [1, 1, 0]),
        (3, [1, 1, 1]),
        (4, [2, 1, 1]),
        (8, [6, 1, 1]),
        (20, [14, 3, 3]),
        (39, [27, 6, 6]),
    ],
)
def test_every_group_gets_labels_in_proportion_and_training_first(
    tmp_path: Path, labeled: int, shares: list[int]
) -> None:
    config = write_clients(tmp_path / "clients", 40, labeled)
    for seed in range(3):
        found = load_population(config, Stream(seed))
        assert [len(found.train), len(found.validation), len(found.test)] == [28, 6, 6]
        assert labels(found) == shares


def test_one_seed_gives_one_split_of_all_clients(tmp_path: Path) -> None:
    config = write_clients(tmp_path / "clients", 40, 8)
    first, again, other = (load_population(config, Stream(seed)).listing() for seed in (0, 0, 1))
    assert first == again != other
    assert len({row["name"] for group in first.values() for row in group}) == 40


@pytest.mark.parametrize("labeled", [0, 20])
def test_clients_that_are_all_alike_are_dealt_in_one_order(labeled: int) -> None:
    """As ever: a run from before goes on."""
    y = np.arange(4) % 3 if labeled else None
    clients = [ClientData(np.full((4, 1), i), y, name=str(i)) for i in range(20)]
    config = DataConfig(validation_clients=3, test_clients=4, certify_clients=2, train_clients=9)
    groups = split_clients(clients, config, Stream(0))
    order = [str(i) for i in Stream(0).child("split").permutation(20)]
    assert {n: [c.name for c in members] for n, members in groups.items()} == {
        "validation": order[:3],
        "test": order[3:7],
        "certify": order[7:9],
        "train": order[9:18],
    }


def test_no_group_gets_more_labels_than_clients() -> None:
    for held in range(4):
        sizes = {"validation": held, "test": 2, "certify": 2, "train": 1}
        for labeled in range(sum(sizes.values()) + 1):
            shares = share_labels(labeled, sizes)
            assert sum(shares.values()) == labeled
            assert all(0 <= shares[name] <= sizes[name] for name in sizes)


def test_clients_that_training_leaves_out_take_their_share_of_labels() -> None:
    clients = [ClientData(np.zeros((1, 1)), [0] if i < 10 else None, str(i)) for i in range(40)]
    config = DataConfig(validation_clients=4, test_clients=4, train_clients=16)
    groups = split_clients(clients, config, Stream(0))
    assert [sum(c.labeled for c in g) for g in groups.values()] == [1, 1, 0, 4]
    assert [len(g) for g in groups.values()] == [4, 4, 0, 16]
