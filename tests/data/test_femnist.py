# mypy: disable-error-code="arg-type, misc"
"""FEMNIST: LEAF's files in any order give the same writers, and damaged ones give none."""

import hashlib
import io
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdup.data import ClientData, DataConfig, InputSpec, Population, load_population
from flowdup.data.femnist import Femnist
from flowdup.data.fetch import fetch
from flowdup.data.sources import SOURCES
from flowdup.errors import ConfigError, DataError
from flowdup.random import Stream

Writers = dict[str, tuple[np.ndarray, np.ndarray]]  # pixels uint8 [n, 784], labels [n]

RANDOM = np.random.default_rng(0)
WRITERS: Writers = {
    f"f{number:04}_{number % 7:02}": (
        RANDOM.integers(0, 256, (points, 784), dtype=np.uint8),
        RANDOM.integers(0, 62, points, dtype=np.uint8),
    )
    for number, points in enumerate([5, 1, 3, 4, 2, 6, 3, 3, 2, 4, 5, 2])
}
_x, _y = WRITERS["f0005_05"]
_x[4], _y[4] = _x[2], _y[2]  # a writer's own equal points, which are no doubles of LEAF's


def canonical(writers: Writers) -> str:
    digest = hashlib.sha256()
    for name, (x, y) in sorted(writers.items()):
        points = sorted(
            hashlib.sha256(bytes([label]) + image.tobytes()).digest()
            for image, label in zip(x, y, strict=True)
        )
        digest.update(name.encode() + b"\0" + hashlib.sha256(b"".join(points)).digest())
    return digest.hexdigest()


def known(writers: Writers) -> Femnist:
    points = sum(len(y) for _, y in writers.values())
    return Femnist(writers=len(writers), points=points, digest=canonical(writers))


SMALL = known(WRITERS)


def leaf(writers: Writers, seed: int) -> Writers:
    """The writers as LEAF stores them: in some order, all but the first with a doubled image."""
    draw = np.random.default_rng(seed)
    stored: Writers = {}
    for name in draw.permutation(sorted(writers)):
        x, y = writers[name]
        order = draw.permutation(len(y))
        order = np.concatenate([order[:1], order]) if stored else order
        stored[str(name)] = (x[order], y[order])
    return stored


def text(writers: Writers) -> dict[str, Any]:
    return {
        "users": list(writers),
        "num_samples": [len(y) for _, y in writers.values()],
        "user_data": {
            name: {"x": (x / 255).tolist(), "y": y.tolist()} for name, (x, y) in writers.items()
        },
    }


def write_json(folder: Path, writers: Writers, per_file: int = 5, ending: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    items = list(writers.items())
    for number, start in enumerate(range(0, len(items), per_file)):
        content = json.dumps(text(dict(items[start : start + per_file])))
        (folder / f"all_data_{number}{ending}.json").write_text(content)
    return folder


def arrays(writers: Writers) -> dict[str, np.ndarray]:
    sizes = [len(y) for _, y in writers.values()]
    return {
        "x": np.concatenate([x for x, _ in writers.values()]).reshape(-1, 28, 28),
        "y": np.concatenate([y for _, y in writers.values()]),
        "writer": np.repeat(np.arange(len(sizes), dtype=np.uint16), sizes),
        "writer_names": np.array(list(writers)),
    }


def npz(writers: Writers, **changes: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **(arrays(writers) | changes))
    return buffer.getvalue()


def stored_as(form: str, folder: Path, writers: Writers) -> Path:
    if form == "json":
        return write_json(folder / "femnist", writers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "femnist.npz").write_bytes(npz(writers))
    return folder / "femnist.npz"


def same(a: list[ClientData], b: list[ClientData]) -> bool:
    return len(a) == len(b) and all(
        one.name == two.name and torch.equal(one.x, two.x) and torch.equal(one.y, two.y)
        for one, two in zip(a, b, strict=True)
    )


def points(client: ClientData) -> list[tuple[int, bytes]]:
    return sorted((int(y), x.numpy().tobytes()) for x, y in zip(client.x, client.y, strict=True))


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        action()
    message = str(caught.value)
    assert "github.com/TalwalkarLab/leaf" in message and "\n" not in message
    return message


both_forms = pytest.mark.parametrize("form", ["json", "npz"])


@both_forms
def test_doubles_are_dropped_and_nothing_else(form: str, tmp_path: Path) -> None:
    path = stored_as(form, tmp_path, leaf(WRITERS, 0))
    clients = SMALL.load(tmp_path)
    assert [client.name for client in clients] == sorted(WRITERS)
    for client in clients:
        x, y = WRITERS[client.name]
        assert client.x.shape == (len(y), 1, 28, 28) and client.x.dtype == torch.uint8
        expected = sorted((int(b), a.tobytes()) for a, b in zip(x, y, strict=True))
        assert points(client) == expected
    assert SMALL.verify(tmp_path) == SMALL.find(tmp_path) == path


@given(st.integers(0, 2**32), st.integers(0, 2**32), st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_both_readers_agree_bit_for_bit_whatever_the_order(
    one: int, other: int, per_file: int
) -> None:
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        stored_as("npz", Path(first), leaf(WRITERS, one))
        write_json(Path(second) / "femnist", leaf(WRITERS, other), per_file)
        assert same(SMALL.load(Path(first)), SMALL.load(Path(second)))


def test_pixels_are_in_memory_once(tmp_path: Path) -> None:
    stored_as("npz", tmp_path, leaf(WRITERS, 0))
    clients = SMALL.load(tmp_path)
    starts = [client.x.data_ptr() for client in clients]
    size = sum(len(x) for x, _ in leaf(WRITERS, 0).values()) * 784
    assert max(starts) - min(starts) < size  # views of one array
    spec = InputSpec(SMALL.shape, "uint8", SMALL.classes)
    checked = Population(spec, clients, [], []).checked().train
    assert [client.x.data_ptr() for client in checked] == starts


def test_json_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    def peak(files: int) -> int:
        folder = tmp_path / str(files)
        many = {f"w{i}": (np.full((20, 784), i, np.uint8), np.arange(20)) for i in range(files)}
        write_json(folder / "femnist", many, 1)
        tracemalloc.start()
        known(many).load(folder)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    assert peak(8) < 2 * peak(1)


def flip(writers: Writers, what: str) -> Writers:
    x, y = (array.copy() for array in writers["f0003_03"])
    if what == "pixel":
        x[-1, 5] ^= 1
    if what == "label":
        y[-1] = (y[-1] + 1) % 62
    if what == "point":
        x, y = x[:-1], y[:-1]
    name = "f9999_99" if what == "name" else "f0003_03"
    return {old: value for old, value in writers.items() if old != "f0003_03"} | {name: (x, y)}


@both_forms
@pytest.mark.parametrize("what", ["pixel", "label", "point", "name"])
def test_a_complete_set_must_have_the_canonical_checksum(
    form: str, what: str, tmp_path: Path
) -> None:
    path = stored_as(form, tmp_path, flip(leaf(WRITERS, 0), what))
    for action in (SMALL.load, SMALL.verify):
        message = refused(lambda action=action: action(tmp_path))
        assert f"{path} is corrupt and is not used" in message
        assert ("points of 12 writers" if what == "point" else "canonical points") in message


def test_a_lost_file_is_noticed(tmp_path: Path) -> None:
    folder = write_json(tmp_path / "femnist", leaf(WRITERS, 0))
    (folder / "all_data_1.json").unlink()
    assert "points of 7 writers, the set 40 of 12" in refused(lambda: SMALL.load(tmp_path))


def test_a_sample_of_leafs_is_accepted_as_it_is(tmp_path: Path) -> None:
    some = dict(list(leaf(WRITERS, 0).items())[:7])
    write_json(tmp_path / "femnist", some, ending="_niid_5_keep_0")
    clients = SMALL.load(tmp_path)
    assert [client.name for client in clients] == sorted(some)
    assert [len(client) for client in clients] == [len(WRITERS[name][1]) for name in sorted(some)]
    assert "a sample of 7 of 12 writers" in refused(lambda: SMALL.verify(tmp_path))


def test_a_sample_that_is_all_of_the_set_must_have_its_checksum(tmp_path: Path) -> None:
    write_json(tmp_path / "femnist", flip(leaf(WRITERS, 0), "pixel"), ending="_niid_0")
    assert "canonical points" in refused(lambda: SMALL.load(tmp_path))


def damaged(damage: str) -> dict[str, Any]:
    content = text(dict(list(leaf(WRITERS, 0).items())[:3]))
    name = content["users"][1]
    points = content["user_data"][name]
    values = {"above 1": 1.5, "below 0": -1 / 255, "between": 0.5, "nan": float("nan")}
    labels = {"62": 62, "-1": -1, "fraction": 1.5, "letter": "a"}
    if damage == "count":
        content["num_samples"][1] += 1
    elif damage == "short image":
        points["x"] = [image[:-1] for image in points["x"]]
    elif damage == "ragged":
        points["x"][0] = points["x"][0][:-1]
    elif damage in values:
        points["x"][0][7] = values[damage]
    elif damage in labels:
        points["y"][0] = labels[damage]
    elif damage == "fewer labels":
        points["y"].pop()
    elif damage == "no user":
        content["users"].pop()
    elif damage == "twice":
        content["users"][0] = name
    elif damage == "empty":
        points["x"], points["y"], content["num_samples"][1] = [], [], 0
    else:
        del {"user_data": content, "x": points, "y": points}[damage][damage]
    return content


@pytest.mark.parametrize(
    "damage",
    [
        "count",
        "short image",
        "ragged",
        "above 1",
        "below 0",
        "between",
        "nan",
        "62",
        "-1",
        "fraction",
        "letter",
        "fewer labels",
        "no user",
        "twice",
        "empty",
        "user_data",
        "x",
        "y",
    ],
)
def test_inconsistent_json_is_refused_even_in_a_sample(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "femnist" / "all_data_3_niid_1.json"
    file.parent.mkdir()
    file.write_text(json.dumps(damaged(damage)))
    assert f"{file} is corrupt and is not used (" in refused(lambda: SMALL.load(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", "7", '{"users": 1}', '{"users": ["a"', "[" * 10**5])
def test_other_text_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "all_data_0.json").write_text(content)
    assert "all_data_0.json is corrupt" in refused(lambda: SMALL.load(tmp_path))


def test_a_writer_in_two_files_is_refused(tmp_path: Path) -> None:
    """As from LEAF's train and test folders thrown together."""
    some = dict(list(leaf(WRITERS, 0).items())[:2])
    write_json(tmp_path / "femnist", some, ending="_niid_0_keep_0_train_9")
    write_json(tmp_path / "femnist", some, ending="_niid_0_keep_0_test_9")
    assert "is there twice" in refused(lambda: SMALL.load(tmp_path))


STORED = leaf(WRITERS, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"x": arrays(STORED)["x"].astype(np.float32)},
        {"x": arrays(STORED)["x"].reshape(-1, 784)},
        {"x": arrays(STORED)["x"][:-1]},
        {"y": arrays(STORED)["y"][:-1]},
        {"y": arrays(STORED)["y"].astype(np.float32)},
        {"y": np.uint8(3)},
        {"writer": arrays(STORED)["writer"] + 1},
        {"writer": arrays(STORED)["writer"].astype(np.float32)},
        {"writer": arrays(STORED)["writer"][::-1]},
        {"writer": np.resize([0, 1], len(arrays(STORED)["y"]))},
        {"writer_names": np.array(list(STORED))[:-1]},
        {"writer_names": np.array([{}], object)},
    ],
)
def test_wrong_arrays_in_an_npz_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "femnist.npz").write_bytes(npz(STORED, **changes))
    assert "femnist.npz is corrupt" in refused(lambda: SMALL.load(tmp_path))


def test_a_missing_array_in_an_npz_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "femnist.npz", x=arrays(STORED)["x"])
    assert "it has no 'y'" in refused(lambda: SMALL.load(tmp_path))


FEW = dict(list(WRITERS.items())[1:3])
PACKED = npz(leaf(FEW, 0))


@given(where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255), cut=st.booleans())
@settings(max_examples=100, deadline=None)
def test_no_flipped_or_missing_byte_of_an_npz_goes_unnoticed(
    where: float, change: int, cut: bool
) -> None:
    """Damage anywhere is a DataError, or lies in a byte that carries nothing (a date, say)."""
    at = int(where * len(PACKED))
    rest = b"" if cut else bytes([PACKED[at] ^ change]) + PACKED[at + 1 :]
    with TemporaryDirectory() as good, TemporaryDirectory() as bad:
        (Path(good) / "femnist.npz").write_bytes(PACKED)
        (Path(bad) / "femnist.npz").write_bytes(PACKED[:at] + rest)
        try:
            clients = known(FEW).load(Path(bad))
        except DataError as error:
            assert "is corrupt and is not used" in str(error)
        else:
            assert same(clients, known(FEW).load(Path(good)))


def test_leafs_folders_are_looked_into_and_an_npz_comes_first(tmp_path: Path) -> None:
    assert SMALL.find(tmp_path) is None
    for place in ("femnist/data/all_data", "femnist/all_data", "femnist"):
        assert SMALL.find(tmp_path) != tmp_path / place
        write_json(tmp_path / place, STORED)
        assert SMALL.verify(tmp_path) == tmp_path / place
    assert stored_as("npz", tmp_path, STORED) == SMALL.verify(tmp_path)


def test_missing_data_says_how_it_is_made_and_where_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWDUP_DATA", str(tmp_path))
    femnist = SOURCES["femnist"]
    for action in (
        lambda: femnist.load(tmp_path),
        lambda: fetch(femnist, tmp_path, lambda name, done, total: None),
        lambda: load_population(DataConfig("femnist"), Stream(0)),
    ):
        message = refused(action)
        assert f"femnist is not in {tmp_path} and cannot be downloaded" in message
        assert "./preprocess.sh" in message and f"in {tmp_path / 'femnist'}" in message


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """A sample of 12 writers where the real set is looked for, and how they are to be split."""
    monkeypatch.setenv("FLOWDUP_DATA", str(tmp_path))
    write_json(tmp_path / "femnist", STORED, ending="_niid_1")
    return DataConfig("femnist", validation_clients=3, test_clients=2)


def names(found: Population) -> list[list[str]]:
    return [[c.name for c in group] for group in (found.train, found.validation, found.test)]


def test_writers_are_split_by_the_seed_into_disjoint_groups(sample: DataConfig) -> None:
    groups = names(load_population(sample, Stream(0)))
    assert [len(group) for group in groups] == [7, 3, 2]
    assert sorted(name for group in groups for name in group) == sorted(WRITERS)
    assert names(load_population(sample, Stream(0))) == groups
    assert names(load_population(sample, Stream(1))) != groups
    found = load_population(sample, Stream(0))
    assert found.spec == InputSpec((1, 28, 28), "uint8", 62, (0.9637,), (0.1591,))


def test_as_many_writers_train_as_told(sample: DataConfig) -> None:
    every = names(load_population(sample, Stream(0)))
    some = names(load_population(replace(sample, train_clients=4), Stream(0)))
    assert some == [every[0][:4], *every[1:]]
    with pytest.raises(ConfigError, match=r"12 clients cannot give 3 .* 2 to test and 8 to train"):
        load_population(replace(sample, train_clients=8), Stream(0))
    with pytest.raises(ConfigError, match=r"12 clients cannot give 10 .* and some to training"):
        load_population(replace(sample, validation_clients=10), Stream(0))


@pytest.mark.parametrize(("share", "labeled"), [(0.0, 0), (0.3, 2), (1.0, 7)])
def test_a_share_p_of_the_training_writers_keeps_its_labels(
    share: float, labeled: int, sample: DataConfig
) -> None:
    found = load_population(replace(sample, labeled_fraction=share), Stream(0))
    assert sum(c.labeled for c in found.train) == labeled
    assert all(c.labeled for c in [*found.validation, *found.test])


@pytest.mark.parametrize("source", ["femnist", "folder", "table"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes_per_client": 2}, "set data.classes_per_client = 0"),
        ({"rotations": (0, 90)}, r"set data.rotations = \[\]"),
        ({"overlap": True, "rotations": (90,)}, r"data.rotations = \[\] and data.overlap = false"),
    ],
)
def test_recipes_for_simulated_clients_are_refused_for_natural_ones(
    source: str, changes: dict[str, Any], said: str, sample: DataConfig
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_population(replace(sample, source=source, path="nowhere", **changes), Stream(0))
