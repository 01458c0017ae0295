"""Which training clients keep their labels."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowdup.config import Config, load_config, override, read_config, read_toml
from flowdup.data import ClientData, DataConfig, load_population
from flowdup.data.labels import LabeledTraits, hide_labels
from flowdup.errors import ConfigError
from flowdup.random import Stream
from flowdup.settings import to_toml

DIGITS = DataConfig(
    points=20,
    overlap=True,
    train_clients=80,
    validation_clients=10,
    test_clients=10,
    classes_per_client=2,
    rotations=(0, 90, 180, 270),
)
SITES = [
    ClientData(torch.zeros(2, 1), torch.zeros(2).long(), f"c{i}", {"site": f"s{i % 4}", "ward": i})
    for i in range(40)
]


def labeled_at(**table: Any) -> LabeledTraits:
    return LabeledTraits.from_table(table)


def test_labels_only_at_two_of_four_rotations() -> None:
    found = load_population(replace(DIGITS, labeled_traits=labeled_at(rotation=[0, 90])), Stream(0))
    for c in found.train:
        assert c.labeled == (c.traits["rotation"] in (0, 90))
    assert all(c.labeled for c in [*found.validation, *found.test])
    whole = load_population(DIGITS, Stream(0))
    assert all(torch.equal(a.x, b.x) for a, b in zip(found.train, whole.train, strict=True))


def test_labels_only_at_half_of_the_class_pairs() -> None:
    config = replace(DIGITS, labeled_traits=labeled_at(classes=0.5))
    found = load_population(config, Stream(0)).train
    by_pair = {(c.traits["classes"], c.labeled) for c in found}
    pairs = Counter(labeled for _, labeled in by_pair)
    assert len({pair for pair, _ in by_pair}) == len(by_pair)  # a pair is labeled or it is not
    assert abs(pairs[True] - pairs[False]) <= 1
    other = load_population(config, Stream(1)).train
    assert {p for p, labeled in by_pair if labeled} != {
        c.traits["classes"] for c in other if c.labeled
    }


@given(st.floats(0.1, 1), st.sets(st.integers(0, 3), min_size=1), st.integers(0, 99))
def test_a_share_p_of_those_that_fit_keeps_labels(p: float, sites: set[int], seed: int) -> None:
    names = [f"s{i}" for i in sites]
    found = hide_labels(SITES, p, labeled_at(site=names), Stream(seed))
    kept = [c for c in found if c.labeled]
    assert len(kept) == round(p * 10 * len(sites))
    assert {c.traits["site"] for c in kept} <= {*names}
    assert [c.name for c in found] == [c.name for c in SITES]


def test_a_client_must_fit_every_trait_that_is_named() -> None:
    found = hide_labels(SITES, 1.0, labeled_at(site=["s1"], ward=[1, 2, 5]), Stream(0))
    assert [c.name for c in found if c.labeled] == ["c1", "c5"]


def test_a_client_without_the_trait_keeps_no_labels() -> None:
    found = hide_labels(
        [*SITES, replace(SITES[0], traits={})], 1.0, labeled_at(site=1.0), Stream(0)
    )
    assert [c.labeled for c in found] == [True] * 40 + [False]


def test_ones_own_clients_keep_labels_by_their_traits(tmp_path: Path) -> None:
    for i in range(12):
        x, y = np.eye(3, dtype="f4")[np.arange(9) % 3], np.arange(9) % 3
        np.savez(tmp_path / f"c{i}.npz", x=x, y=y, site=f"s{i % 3}")
    traits = labeled_at(site=["s2"])
    config = DataConfig(
        "folder",
        path=str(tmp_path),
        validation_clients=2,
        test_clients=2,
        labeled_traits=traits,
    )
    for c in load_population(config, Stream(0)).train:
        assert c.labeled == (c.traits["site"] == "s2")


@pytest.mark.parametrize(
    ("table", "fraction", "said"),
    [
        ({"site": ["s9"]}, 1.0, r"by 'site': clients have s0, s1, s2, s3; name some"),
        ({"site": []}, 1.0, "no training client with labels by 'site'"),
        ({"site": 0.1}, 1.0, "no training client with labels by 'site'.* or a larger share"),
        ({"sight": ["s0"]}, 1.0, "clients have no such trait"),
        ({"ward": [99]}, 1.0, r"clients have 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, \.\.\.; name"),
        ({"site": ["s0"]}, 0.01, "of 10 training clients .* raise data.labeled_fraction"),
    ],
)
def test_settings_that_leave_no_labeled_client_are_refused(
    table: dict[str, Any], fraction: float, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        hide_labels(SITES, fraction, labeled_at(**table), Stream(0))


def test_clients_that_never_had_labels_are_none_that_keep_them() -> None:
    hidden = [c.unlabeled() for c in SITES]
    with pytest.raises(ConfigError, match="none keeps labels"):
        hide_labels(hidden, 1.0, labeled_at(site=["s0"]), Stream(0))


def test_lazy_clients_are_not_chosen_by_traits() -> None:
    config = replace(DIGITS, lazy=True, labeled_traits=labeled_at(rotation=[0]))
    with pytest.raises(ConfigError, match=r"set data\.lazy = false"):
        load_population(config, Stream(0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data.labeled_traits=3", "must be a table"),
        (
            "data.labeled_traits.rotation=90",
            "data.labeled_traits.rotation' must be between 0 and 1",
        ),
        ("data.labeled_traits.rotation=zero", "a list of values, or a share"),
        ("data.labeled_traits.rotation=true", "a list of values, or a share"),
        ("data.labeled_traits.rotation=[[0]]", "must have single values"),
        ("data.labeled_traits.rotation=[nan]", "finite in float32"),
        ("data.labeled_trait.rotation=[0]", "did you mean 'data.labeled_traits'"),
    ],
)
def test_odd_settings_are_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("digits", [text])


@pytest.mark.parametrize(
    "traits",
    [{}, {"rotation": [0, 90]}, {"classes": 0.5, "the site": ["a", 2, 0.5, True]}, {"a.b\n": [1]}],
)
def test_settings_are_written_and_read_again(traits: dict[str, Any], tmp_path: Path) -> None:
    config: Config = read_config({"data": {"labeled_traits": traits}})
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert read_config(read_toml(tmp_path / "config.toml")) == config
    assert config.data.labeled_traits.table() == traits


def test_on_the_command_line_a_trait_is_a_key() -> None:
    table = override({}, "data.labeled_traits.rotation=[0, 90]")
    assert read_config(table).data.labeled_traits == labeled_at(rotation=[0, 90])
