"""Clients that are set aside for a certificate: nobody else has them, and without them all is as
it was.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowdup.data import ClientData, DataConfig, load_population
from flowdup.data.loading import LOADERS, register_source
from flowdup.data.population import Population
from flowdup.errors import ConfigError
from flowdup.random import Stream

DIGITS = DataConfig(
    points=20,
    overlap=True,
    train_clients=30,
    validation_clients=6,
    test_clients=6,
    rotations=(0, 90),
)


def pixels(clients: list[ClientData]) -> set[bytes]:
    upright = (np.rot90(c.x.numpy(), -int(c.traits["rotation"]) // 90, (2, 3)) for c in clients)
    return {image.tobytes() for x in upright for image in x.copy()}


def groups(found: Population) -> dict[str, list[ClientData]]:
    return {n: list(getattr(found, n)) for n in ("train", "validation", "test", "certify")}


@pytest.mark.parametrize("change", [{}, {"overlap": False, "points": 10}, {"lazy": True}])
def test_they_share_no_image_with_anyone_and_keep_their_labels(change: dict[str, Any]) -> None:
    config = replace(DIGITS, certify_clients=9, labeled_fraction=0.5, **change)
    found = groups(load_population(config, Stream(0)))
    assert len(found["certify"]) == 9 and all(c.labeled for c in found["certify"])
    assert [c.name for c in found["certify"]][:2] == ["certify-0", "certify-1"]
    own = pixels(found.pop("certify"))
    assert not any(own & pixels(others) for others in found.values())


def test_without_them_nothing_changes_and_the_listing_names_none() -> None:
    listing = load_population(DIGITS, Stream(0)).listing()
    assert list(listing) == ["train", "validation", "test"]
    with_some = load_population(replace(DIGITS, certify_clients=4), Stream(0)).listing()
    assert [row["name"] for row in with_some["certify"]] == [f"certify-{i}" for i in range(4)]


def test_a_users_clients_are_dealt_out_and_the_other_groups_stay_the_same() -> None:
    clients = [ClientData(np.random.rand(4, 3), np.arange(4) % 2, str(i)) for i in range(20)]
    register_source("some-clients", lambda config, stream: clients)
    try:
        plain = DataConfig("some-clients", validation_clients=3, test_clients=4)
        before = groups(load_population(plain, Stream(0)))
        after = groups(load_population(replace(plain, certify_clients=5), Stream(0)))
        with pytest.raises(ConfigError, match=r"4 to test, 14 to certify and some to training"):
            load_population(replace(plain, certify_clients=14), Stream(0))
    finally:
        LOADERS.unregister("some-clients")
    names = {n: [c.name for c in found] for n, found in after.items()}
    assert names["validation"] == [c.name for c in before["validation"]]
    assert names["test"] == [c.name for c in before["test"]]
    assert names["certify"] + names["train"] == [c.name for c in before["train"]]
    assert len(names["certify"]) == 5


def test_a_group_of_that_name_is_taken_as_it_is(tmp_path: Path) -> None:
    for group in ("train", "certify"):
        (tmp_path / group).mkdir()
        for i in range(3):
            x, y = np.random.rand(4, 3).astype(np.float32), np.arange(4) % 2
            np.savez(tmp_path / group / f"{group}-{i}.npz", x=x, y=y)
    config = DataConfig("folder", path=str(tmp_path), validation_clients=0, test_clients=0)
    assert len(load_population(config, Stream(0)).certify) == 3
    (tmp_path / "certify").rename(tmp_path / "validation")
    with pytest.raises(ConfigError, match="put some into a group 'certify'"):
        load_population(replace(config, certify_clients=2), Stream(0))
