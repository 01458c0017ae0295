"""`flowdup init` looks at a user's clients and writes settings that train as they are."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from commands.here import flowdup
from pyarrow import csv

from flowdup.config import Config, load_config
from flowdup.data import load_population
from flowdup.random import Stream
from flowdup.run import train_run


def write_client(file: Path, seed: int, points: int = 12, **change: Any) -> None:
    """Two features that tell three classes, and one that is the same for everybody."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 3, points)
    x = np.stack([y + draw.normal(size=points), draw.normal(size=points), np.full(points, 0.3)], 1)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **({"x": x, "y": y} | change))


def write_clients(folder: Path, clients: int) -> None:
    for number in range(clients):
        write_client(folder / f"c{number}.npz", number)


def in_short(config: Config) -> Config:
    """Every stage with two rounds."""
    before = tuple(replace(s, server=replace(s.server, rounds=2)) for s in config.before)
    return replace(config, before=before, server=replace(config.server, rounds=2))


@pytest.mark.parametrize("clients", [1, 2, 3, 20])
def test_its_file_trains_as_it_is(tmp_path: Path, clients: int) -> None:
    write_clients(tmp_path / "clients", clients)
    ended = flowdup("init", tmp_path / "clients", "--out", tmp_path / "own.toml")
    assert ended.code == 0 and f"{clients} clients, {clients} with labels" in ended.out
    config = load_config(str(tmp_path / "own.toml"))
    method = "flowdup-plus" if clients == 20 else "fedavg"
    assert (config.model, config.method.name) == ("mlp", method)
    assert config.client.batch_size == 12
    held = {1: (0, 0), 2: (1, 0), 3: (1, 1), 20: (3, 3)}[clients]
    assert (config.data.validation_clients, config.data.test_clients) == held
    stages = 2 if clients == 20 else 1
    assert config.rounds == 300 * stages
    rounds = list(train_run(in_short(config), tmp_path / "run"))
    assert [row.get("stage", 0) for row in rounds] == [0, 0, 1, 1][: 2 * stages]


@pytest.mark.parametrize(
    ("shape", "model", "shift"),
    [((1, 12, 12), "cnn-small", 1), ((3, 32, 32), "cnn", 4), ((3, 4, 2), "mlp", 0)],
)
def test_images_get_a_network_of_their_size(
    tmp_path: Path, shape: tuple[int, ...], model: str, shift: int
) -> None:
    for number in range(4):
        x = np.random.default_rng(number).integers(0, 255, (4, *shape), np.uint8)
        write_client(tmp_path / "clients" / f"{number}.npz", 0, 4, x=x, y=["cat", "dog"] * 2)
    assert flowdup("init", tmp_path / "clients", "--out", tmp_path / "own.toml").code == 0
    config = load_config(str(tmp_path / "own.toml"))
    assert (config.model, config.client.shift) == (model, shift)
    assert config.data.classes == 0  # their names tell


def test_a_table_and_groups_are_found(tmp_path: Path) -> None:
    rows = [f"c{i % 5},{i % 2},{i},{-i}" for i in range(40)]
    (tmp_path / "all.csv").write_text("\n".join(["client,label,a,b", *rows]))
    told = flowdup("init", tmp_path / "all.csv", "--out", tmp_path / "table.toml").out
    assert "inputs: float32 [2], the columns a, b\n" in told
    (tmp_path / "parts").mkdir()
    pq.write_table(csv.read_csv(tmp_path / "all.csv"), tmp_path / "parts" / "0.parquet")
    ended = flowdup("init", tmp_path / "parts", "--out", tmp_path / "parts.toml")
    assert "has no column 'x'" in ended.error
    assert load_config(str(tmp_path / "table.toml")).data.source == "table"
    for group, clients in (("train", 3), ("validation", 1)):
        for number in range(clients):
            write_client(tmp_path / "split" / group / f"{group}{number}.npz", number)
    told = flowdup("init", tmp_path / "split", "--out", tmp_path / "split.toml").out
    assert "4 clients (train 3, validation 1)" in told
    assert "validation_clients" not in (tmp_path / "split.toml").read_text()


def write_partly(folder: Path, clients: int, labeled: int) -> None:
    """The first ones have labels."""
    for number in range(clients):
        given: dict[str, Any] = {} if number < labeled else {"y": np.full(12, -1)}
        write_client(folder / f"{folder.name}{number}.npz", number, **given)


def test_how_many_clients_of_each_group_have_labels_is_told_as_they_will_be_split(
    tmp_path: Path,
) -> None:
    write_partly(tmp_path / "clients", 40, 8)
    file = tmp_path / "own.toml"
    told = flowdup("init", tmp_path / "clients", "--out", file)
    line = "labels: 6 of 28 training, 1 of 6 validation, 1 of 6 test clients\n"
    assert told.code == 0 and line in told.out and f"# {line}" in file.read_text()
    config = load_config(str(file))
    found = load_population(config.data, Stream(config.seed).child("data"))
    groups = (found.train, found.validation, found.test)
    assert [sum(c.labeled for c in group) for group in groups] == [6, 1, 1]


@pytest.mark.parametrize(
    ("labeled", "remarks"),
    [
        (1, ["0 of 6 validation clients have", "none of 6 test clients has labels"]),
        (2, ["1 of 6 validation clients have", "none of 6 test clients has labels"]),
        (3, ["1 of 6 validation clients have"]),
        (32, []),
        (40, []),
    ],
)
def test_few_clients_with_labels_to_measure_by_are_told(
    tmp_path: Path, labeled: int, remarks: list[str]
) -> None:
    write_partly(tmp_path / "clients", 40, labeled)
    file = tmp_path / "own.toml"
    ended = flowdup("init", tmp_path / "clients", "--out", file, "--json")
    found = [
        text
        for text in json.loads(ended.out)["remarks"]
        if re.search("(validation|test) clients h", text)
    ]
    assert [text[: len(begin)] for text, begin in zip(found, remarks, strict=True)] == remarks
    assert all(f"# note: {text}\n" in file.read_text() for text in found)


def test_labels_are_taken_from_training_only_where_the_cost_is_named(tmp_path: Path) -> None:
    for group, clients, labeled in (("train", 12, 11), ("validation", 3, 1), ("test", 2, 0)):
        write_partly(tmp_path / "split" / group, clients, labeled)
    write_partly(tmp_path / "clients", 40, 8)
    told = flowdup("init", tmp_path / "split", "--out", tmp_path / "split.toml").out
    assert "labels: 11 of 12 training, 1 of 3 validation, 0 of 2 test clients\n" in told
    for group in ("validation", "test"):
        cost = f"move some that have labels from train to {group} (training then learns from fewer)"
        assert f"label more clients, or {cost}" in told
    told = flowdup("init", tmp_path / "clients", "--out", tmp_path / "own.toml").out
    assert "or raise data.validation_clients (training then learns from fewer)" in told


def by_init(folder: Path) -> Config:
    """What it writes."""
    ended = flowdup("init", folder, "--out", folder.with_suffix(".toml"))
    assert ended.code == 0, ended.error
    return load_config(str(folder.with_suffix(".toml")))


@pytest.mark.parametrize("shape", [(3,), (3, 20, 20)])
def test_of_few_training_clients_with_labels_one_model_for_all_is_learned(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """As the first of FLowDUP+'s stages does it, and without a correction."""
    for labeled in (8, 30):
        for number in range(40):
            x = np.random.default_rng(number).normal(size=(12, *shape))
            given: dict[str, Any] = {} if number < labeled else {"y": np.full(12, -1)}
            write_client(tmp_path / str(labeled) / f"{number}.npz", number, x=x, **given)
    few, many = by_init(tmp_path / "8"), by_init(tmp_path / "30")
    first = many.before[0]
    assert (many.method.name, few.method.name) == ("flowdup-plus", "fedavg-pseudo")
    assert few.method.table() == first.method.table() | {"correction": "none"}
    assert (few.client, few.server, few.before) == (first.client, first.server, ())
    assert len(list(train_run(in_short(few), tmp_path / "run"))) == 2


def test_why_one_model_for_all_is_learned_is_told(tmp_path: Path) -> None:
    for name, clients, labeled in (("some", 30, 9), ("all", 9, 9), ("enough", 14, 14)):
        write_partly(tmp_path / name, clients, labeled)
        told = flowdup("init", tmp_path / name, "--out", tmp_path / f"{name}.toml").out
        config = load_config(str(tmp_path / f"{name}.toml"))
        method = {"some": "fedavg-pseudo", "all": "fedavg", "enough": "flowdup-plus"}[name]
        why = f"of fewer than 10 a hypernetwork learns little: the method is {method}, one model"
        assert config.method.name == method
        for text in (told, (tmp_path / f"{name}.toml").read_text()):
            assert (why in text) == (name != "enough")


def test_what_is_odd_is_told_and_stands_in_the_file(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", 12)
    write_client(tmp_path / "clients" / "tw\nin.npz", 3)
    write_client(tmp_path / "clients" / "one.npz", 20, 40, y=np.full(40, 4))
    write_client(tmp_path / "clients" / "silent.npz", 21, 9, y=np.full(9, -1))
    ended = flowdup("init", tmp_path / "clients", "--out", tmp_path / "own.toml", "--json")
    found = json.loads(ended.out)
    assert found["file"] == str(tmp_path / "own.toml") and found["problems"] == []
    assert found["points"] == {"least": 9, "median": 12, "most": 40}
    assert found["remarks"] == [
        "1 clients have exactly the data of another (c3, tw\nin): the same one may train and test, "
        "so keep one of each",
        "input channels that never vary: 2 (of 3)",
        "1 of 15 clients have no labels",
        "1 of 14 labeled clients have one class only",
        "classes without a point: 3",
        "1 clients have less than 10 points",
    ]
    text = (tmp_path / "own.toml").read_text()
    lines = [remark.replace("\n", "?") for remark in found["remarks"]]
    assert all(f"# note: {line}\n" in text for line in lines)


@pytest.mark.parametrize(
    ("shape", "dtype", "gray"),
    [
        ((12, 10), np.uint8, True),
        ((1, 12, 10), np.uint8, False),
        ((12, 10), np.float32, False),
        ((3, 64), np.uint8, False),
    ],
)
def test_gray_images_without_channels_are_told(
    tmp_path: Path, shape: tuple[int, ...], dtype: type, gray: bool
) -> None:
    for number in range(3):
        x: Any = np.random.default_rng(number).integers(0, 255, (12, *shape)).astype(dtype)
        write_client(tmp_path / "clients" / f"{number}.npz", number, x=x)
    told = flowdup("init", tmp_path / "clients", "--out", tmp_path / "own.toml").out
    remark = "if these are gray images, store them as [n, 1, 12, 10]"
    assert (remark in told) == (remark in (tmp_path / "own.toml").read_text()) == gray


@pytest.mark.parametrize(("alone", "consequence"), [(1, False), (11, True), (12, True)])
def test_what_follows_from_clients_of_one_class_is_told(
    tmp_path: Path, alone: int, consequence: bool
) -> None:
    for number in range(12):
        given: dict[str, Any] = {"y": np.full(12, number % 2)} if number < alone else {}
        write_client(tmp_path / "clients" / f"{number}.npz", number, **given)
    ended = flowdup("init", tmp_path / "clients", "--out", tmp_path / "own.toml", "--json")
    begin = f"{alone} of 12 labeled clients have one class only"
    (remark,) = (text for text in json.loads(ended.out)["remarks"] if text.startswith(begin))
    for word in ("accuracy on validation clients", "correction for class shares", "may mislead"):
        assert (word in remark) == consequence


def test_columns_that_lose_their_digits_are_told(tmp_path: Path) -> None:
    rows = [f"u{c},{n % 2},{1.7e9 + 7 * n},{n % 5}" for c in range(3) for n in range(12)]
    (tmp_path / "all.csv").write_text("\n".join(["client,label,time,speed", *rows]))
    ended = flowdup("init", tmp_path / "all.csv", "--out", tmp_path / "own.toml")
    assert ended.code == 0, ended.error
    for text in (ended.out, (tmp_path / "own.toml").read_text()):
        assert "note: inputs time differ by a millionth of their size (1.7e+09) or less" in text


def test_labels_that_are_codes_are_told_to_be_names(tmp_path: Path) -> None:
    for number in range(3):
        write_client(tmp_path / "clients" / f"c{number}.npz", number, y=np.resize([3, 401], 12))
    ended = flowdup("init", tmp_path / "clients", "--out", tmp_path / "own.toml")
    assert ended.code == 0, ended.error
    for said in ('2 classes, 2 at a typical client: "401" 50%', "names of classes: 3, 401;"):
        assert said in ended.out and said in (tmp_path / "own.toml").read_text()
    assert "without a point" not in ended.out


def test_names_of_classes_are_told_in_their_own_letters(tmp_path: Path) -> None:
    names = np.array(["Käfer", "蝶", "a\x9bb", 'say "x"'])
    for number in range(3):
        write_client(tmp_path / "clients" / f"c{number}.npz", number, y=np.resize(names, 12))
    ended = flowdup("init", tmp_path / "clients", "--out", tmp_path / "own.toml")
    assert ended.code == 0, ended.error
    for text in (ended.out, (tmp_path / "own.toml").read_text("utf-8")):
        for name in ('"Käfer" 25%', '"蝶" 25%', '"a?b" 25%', r'"say \"x\"" 25%'):
            assert name in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": np.full((2, 3), np.nan), "y": [0, 1]}, "client bad: NaN or infinite numbers in 2"),
        ({"x": np.zeros((2, 4)), "y": [0, 1]}, "client bad: inputs of another shape than [3]"),
        ({"x": np.zeros((2, 3), np.uint8), "y": [0, 1]}, "client bad: inputs are not float32"),
        ({"y": np.full(12, -7)}, "client bad: labels below -1"),
    ],
)
def test_what_cannot_be_trained_on_is_named_and_no_file_is_written(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    write_clients(tmp_path / "clients", 2)
    write_client(tmp_path / "clients" / "bad.npz", 1, **change)
    ended = flowdup("init", tmp_path / "clients", "--out", tmp_path / "own.toml")
    assert ended.code == 2 and f"must be mended: {sentence}" in ended.out
    assert "for the reasons above" in ended.error
    assert not (tmp_path / "own.toml").exists()


def test_one_class_or_no_labels_at_all_are_problems(tmp_path: Path) -> None:
    for name, label in (("one", 2), ("none", -1)):
        write_client(tmp_path / name / "c.npz", 1, y=np.full(12, label))
        found = json.loads(
            flowdup("init", tmp_path / name, "--out", tmp_path / "own.toml", "--json").out
        )
        assert [p.split(";")[0] for p in found["problems"]] == [
            {"one": "all labels are of one class", "none": "no client has a label"}[name]
        ]
        assert found["file"] is None


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", 2)
    (tmp_path / "own.toml").write_text("mine")
    ended = flowdup("init", tmp_path / "clients", "--out", tmp_path / "own.toml")
    assert "exists already" in ended.error and (tmp_path / "own.toml").read_text() == "mine"
