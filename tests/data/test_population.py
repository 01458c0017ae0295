"""From settings to the clients of a federation."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flowdup.config import read_config
from flowdup.data import ClientData, DataConfig, InputSpec, load_population
from flowdup.data.images import Images
from flowdup.data.loading import LOADERS, register_source
from flowdup.data.sources import SOURCES
from flowdup.errors import ConfigError, DataError
from flowdup.random import Stream
from flowdup.run import train_run

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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"path": "here"}, 'data.path = ""'),
        ({"classes": 12}, "data.classes = 0"),
        ({"shape": (8, 8)}, r"data.shape = \[\]"),
        ({"mean": (0.5,), "std": (0.5,)}, r"data.mean = \[\] and data.std = \[\]"),
    ],
)
@pytest.mark.parametrize("source", ["digits", "femnist"])
def test_what_is_known_of_a_public_set_cannot_be_set(
    source: str, change: dict[str, Any], said: str
) -> None:
    config = DataConfig(source=source, **change)
    with pytest.raises(ConfigError, match=f"'{source}' is a public set, .* set {said}"):
        load_population(config, Stream(0))


def test_a_listing_tells_of_which_images_each_client_is_made() -> None:
    config = replace(DIGITS, classes_per_client=2, rotations=(0, 90), labeled_fraction=0.5)
    found, again = (load_population(config, Stream(3)) for _ in range(2))
    assert found.listing() == again.listing() != load_population(config, Stream(4)).listing()
    source = SOURCES["digits"].load(Path())
    assert isinstance(source, Images)
    stored = {"train": source.x_train, "validation": source.x_train, "test": source.x_test}
    for group, rows in found.listing().items():
        for row, client in zip(rows, getattr(found, group), strict=True):
            turned = torch.rot90(
                stored[group][list(row["images"])], row["traits"]["rotation"] // 90, (-2, -1)
            )
            assert torch.equal(turned, client.x)
    listed = found.listing()
    assert sum(row["labeled"] for row in listed["train"]) == 20
    a, b = ({i for row in listed[g] for i in row["images"]} for g in ("train", "validation"))
    assert not a & b


@pytest.mark.parametrize(
    ("share", "labeled"), [(0.05, 2), (0.29, 12), (0.5, 20), (1.0, 40), (0.0, 0)]
)
def test_a_share_p_of_the_training_clients_keeps_its_labels(share: float, labeled: int) -> None:
    found = load_population(replace(DIGITS, labeled_fraction=share), Stream(0))
    assert sum(c.labeled for c in found.train) == labeled
    assert all(c.y is None for c in found.train if not c.labeled)
    assert all(c.labeled for c in [*found.validation, *found.test])


def test_stratified_groups_change_and_others_stay() -> None:
    config = replace(DIGITS, classes_per_client=2, rotations=(0, 90), validation_clients=50)
    plain = load_population(config, Stream(0)).listing()
    found = load_population(replace(config, stratified=("validation",)), Stream(0))
    assert found.listing()["train"] == plain["train"] and found.listing()["test"] == plain["test"]
    assert found.listing()["validation"] != plain["validation"]
    pairs = Counter(c.traits["classes"] for c in found.validation)
    assert len(pairs) == 45 and max(pairs.values()) == 2
    assert Counter(c.traits["rotation"] for c in found.validation) == {0: 25, 90: 25}
    a, b = (
        {i for row in found.listing()[g] for i in row["images"]} for g in ("train", "validation")
    )
    assert not a & b
    both = load_population(replace(config, stratified=("test", "validation")), Stream(0)).listing()
    assert both["validation"] == found.listing()["validation"] and both["train"] == plain["train"]
    assert both["test"] != plain["test"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dirichlet", [0.1, 0.5])
def test_groups_of_dirichlet_clients_share_no_image(overlap: bool, dirichlet: float) -> None:
    config = replace(DIGITS, overlap=overlap, dirichlet=dirichlet, rotations=(0, 90))
    listed = load_population(config, Stream(0)).listing()
    train, validation = (
        {i for row in listed[g] for i in row["images"]} for g in listed if g != "test"
    )
    assert not train & validation
    assert all(row["points"] == 20 and "rotation" in row["traits"] for row in listed["test"])
    same = load_population(config, Stream(0)).listing()
    assert listed == same != load_population(config, Stream(1)).listing()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dirichlet": 0.1}, r"set data.dirichlet = 0.0$"),
        ({"stratified": ("test",)}, r"set data.stratified = \[\]$"),
    ],
)
def test_clients_of_their_own_are_not_made_by_a_recipe(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_population(DataConfig("folder", **change), Stream(0))


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


def test_unknown_sources_and_too_large_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match="use one of digits, mnist"):
        load_population(DataConfig("imagenet"), Stream(0))
    with pytest.raises(ConfigError, match="no training client"):
        load_population(DataConfig(points=1000), Stream(0))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"points": 0}, "data.points' must be at least 1, not 0"),
        ({"train_clients": -1}, "data.train_clients' must be at least 0"),
        ({"validation_clients": -1}, "data.validation_clients' must be at least 0"),
        ({"test_clients": -1}, "data.test_clients' must be at least 0"),
        ({"classes_per_client": -1}, "data.classes_per_client' must be at least 0"),
        ({"dirichlet": -0.1}, "data.dirichlet' must be at least 0"),
        ({"stratified": ("train",)}, "data.stratified must name groups, validation or test"),
        ({"classes": -1}, "data.classes' must be at least 0"),
        ({"labeled_fraction": 1.5}, "data.labeled_fraction' must be between 0 and 1"),
        ({"labeled_fraction": float("nan")}, "data.labeled_fraction' must be between 0 and 1"),
        ({"shape": (3, 0)}, "data.shape must have sizes of at least 1"),
        ({"mean": (0.5,), "std": (0.0,)}, "data.std must have numbers above 0"),
        ({"mean": (0.5,), "std": (-1.0,)}, "data.std must have numbers above 0"),
        ({"mean": (float("inf"),), "std": (1.0,)}, "data.mean finite ones"),
        ({"mean": (0.5, 0.5), "std": (1.0,)}, "data.mean and data.std must have equally many"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DataConfig(**settings)


@pytest.mark.parametrize("classes", [0, 2])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("validation", "test"), [(0, 5), (5, 0), (0, 0)])
def test_a_group_may_have_no_clients(
    classes: int, overlap: bool, validation: int, test: int
) -> None:
    config = DataConfig(
        points=20,
        train_clients=30,
        validation_clients=validation,
        test_clients=test,
        classes_per_client=classes,
        rotations=(0, 90),
        overlap=overlap,
    )
    found = load_population(config, Stream(0))
    assert [len(g) for g in (found.train, found.validation, found.test)] == [30, validation, test]


@pytest.mark.parametrize("shape", [(), (3,)])
def test_inputs_without_a_row_per_point_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"client 'eve' has inputs of shape .* one row per point"):
        InputSpec((3,), "float32", 2).check(ClientData(torch.zeros(shape), name="eve"))


def shops(path: Path) -> DataConfig:
    """A table of 12 clients with 10 points each; a point's class is which of its inputs is 1."""
    y = np.arange(120) % 3
    columns = {"client": np.arange(120) // 10, "x": np.eye(3)[y].tolist(), "label": y}
    pq.write_table(pa.table(columns), path)
    return DataConfig("table", path=str(path), validation_clients=2, test_clients=3)


def test_a_table_is_split_into_groups_of_its_clients(tmp_path: Path) -> None:
    found = load_population(shops(tmp_path / "shops.parquet"), Stream(0))
    assert replace(found.spec, mean=(), std=()) == InputSpec((3,), "float32", 3)
    groups = (found.train, found.validation, found.test)
    assert [len(g) for g in groups] == [7, 2, 3]
    assert {c.name for g in groups for c in g} == {str(i) for i in range(12)}
    for c in found.train:
        assert c.y is not None and torch.equal(c.x.argmax(1), c.y)


def test_a_table_without_a_label_column_needs_the_number_of_classes(tmp_path: Path) -> None:
    config = replace(shops(tmp_path / "shops.parquet"), label_column="")
    with pytest.raises(DataError, match=r"set data\.classes"):
        load_population(config, Stream(0))
    found = load_population(replace(config, classes=3), Stream(0))
    assert replace(found.spec, mean=(), std=()) == InputSpec((3,), "float32", 3)
    assert not any(c.labeled for c in [*found.train, *found.validation, *found.test])
    assert "label" not in found.train[0].traits


def test_one_learns_from_a_table(tmp_path: Path) -> None:
    config = read_config(
        {
            "model": "mlp",
            "method": {"name": "fedavg"},
            "server": {"rounds": 5, "cohort": 4},
            "engine": {"device": "cpu"},
        }
    )
    config = replace(config, data=shops(tmp_path / "shops.parquet"))
    losses = [metrics["loss"] for metrics in train_run(config, tmp_path / "run")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"train": []}, "with at least one client"),
        ({"test": []}, "gave the groups test"),
        ({"train": [ClientData(torch.zeros(2, 3))], "valid": []}, "train, valid"),
        ({"train": [ClientData(torch.zeros(2))]}, "one row per point"),
    ],
)
def test_a_source_of_a_users_own_that_gives_something_else_is_told_so(
    found: dict[str, list[ClientData]], sentence: str
) -> None:
    register_source("odd", lambda config, stream: found)
    try:
        with pytest.raises(DataError, match=sentence):
            load_population(DataConfig("odd"), Stream(0))
    finally:
        LOADERS.unregister("odd")
