"""Classes keep their names from the data to the predictions, and what is no class is told so."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crafted import seal
from PIL import Image
from small import SPEC, client, population
from typer.testing import CliRunner

import flowdup
from flowdup.cli import app
from flowdup.config import Config, read_config
from flowdup.data import ClientData, DataConfig, InputSpec, Population, load_population
from flowdup.data.loading import LOADERS
from flowdup.errors import CheckpointError, ConfigError, DataError
from flowdup.models import build_network
from flowdup.random import Stream
from flowdup.run.start import load_start

NAMES = ("ape", "bee", "cat", "dog")
NAMED = replace(SPEC, class_names=NAMES)


def config(**changes: Any) -> Config:
    small = {
        "model": "mlp",
        "method": {"name": "fedavg"},
        "server": {"rounds": 2, "cohort": 3},
        "engine": {"device": "cpu"},
    }
    return read_config(small | changes)


def named_population() -> Population:
    return replace(population(), spec=NAMED)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    list(flowdup.train_run(config(), folder, population=named_population()))
    return folder


def without_names(run: Path, folder: Path) -> Path:
    """A copy of a run as it was before classes had names."""
    folder.mkdir()
    for place in ("checkpoint", "best"):
        for file in (run / place).glob("*"):
            (folder / place).mkdir(exist_ok=True)
            content = file.read_bytes()
            if file.name == "checkpoint.json":
                table = json.loads(content)
                del table["federation"]["inputs"]["class_names"]
                content = seal(table)
            (folder / place / file.name).write_bytes(content)
    for name in ("config.toml", "clients.json", "metrics.jsonl"):
        (folder / name).write_bytes((run / name).read_bytes())
    return folder


def test_names_travel_from_the_clients_to_a_model_file(run: Path, tmp_path: Path) -> None:
    federation = flowdup.load(run)
    assert federation.spec.inputs.class_names == NAMES
    x = client(30, 7).x
    federation.personalize(x).save(tmp_path / "me.safetensors")
    model = flowdup.load_model(tmp_path / "me.safetensors")
    assert model.class_names == NAMES
    found = model.predictions(x)
    assert found["classes"] == model.predict(x).tolist()
    assert found["names"] == [NAMES[c] for c in found["classes"]]
    best = model.predict_proba(x).amax(1)
    assert torch.equal(torch.tensor(found["probabilities"]), best)
    assert flowdup.evaluate_run(run, named_population())["class_names"] == list(NAMES)


def test_probabilities_are_the_softmax_of_logits_in_chunks(run: Path) -> None:
    model = flowdup.load(run).personalize(client(30, 7).x)
    x = client(31, 2100).x  # more than are read at once
    found = model.predict_proba(x)
    assert torch.allclose(found, model(x).softmax(1))
    assert torch.equal(found.argmax(1), model.predict(x))
    assert found.shape == (2100, 4) and not found.requires_grad


def test_names_change_no_bit_of_training(run: Path, tmp_path: Path) -> None:
    list(flowdup.train_run(config(), tmp_path, population=population()))
    here, there = flowdup.load(tmp_path), flowdup.load(run)
    assert here.spec.inputs.class_names == () and here.personalize(client(0, 3).x).class_names
    assert all(torch.equal(here.psi[name], there.psi[name]) for name in there.psi)


def test_a_checkpoint_from_before_names_loads_and_trains_on(run: Path, tmp_path: Path) -> None:
    old = without_names(run, tmp_path / "old")
    federation = flowdup.load(old)
    assert federation.spec.inputs.class_names == ()
    assert federation.personalize(client(0, 3).x).class_names == ("0", "1", "2", "3")
    longer = config(server={"rounds": 3, "cohort": 3})
    list(flowdup.train_run(longer, old, resume=True, population=named_population()))
    assert flowdup.load(old).spec.inputs.class_names == NAMES


def test_a_run_does_not_go_on_with_classes_of_other_names(run: Path, tmp_path: Path) -> None:
    other = replace(population(), spec=replace(SPEC, class_names=NAMES[::-1]))
    with pytest.raises(CheckpointError, match="another federation"):
        flowdup.evaluate_run(run, other)
    assert load_start(run, "mlp", SPEC)  # without names nothing is at odds
    with pytest.raises(ConfigError, match="its class_names is"):
        load_start(run, "mlp", other.spec)


@pytest.mark.parametrize(
    "names",
    [NAMES[:3], (*NAMES[:3], "cat"), (*NAMES[:3], ""), (*NAMES[:3], "d" * 1001), "abcd", 7, None],
    ids=lambda names: str(names)[:20],
)
def test_what_cannot_name_the_classes_is_one_sentence(names: Any) -> None:
    with pytest.raises(DataError, match=": give") as found:
        InputSpec((3,), "float32", 4, class_names=names)
    assert len(str(found.value)) < 300


def test_a_header_with_odd_names_is_no_checkpoint(run: Path, tmp_path: Path) -> None:
    copy = without_names(run, tmp_path / "old") / "checkpoint" / "checkpoint.json"
    wrong = {"instead of a text": [1, 2, 3, 4], "instead of a list": "abcd", "cannot name": ["a"]}
    for said, names in wrong.items():
        table = json.loads(copy.read_bytes())
        table["federation"]["inputs"]["class_names"] = names
        copy.write_bytes(seal(table))
        with pytest.raises(CheckpointError, match=rf"is no checkpoint \(.*{said}"):
            flowdup.load(copy.parent)


def test_a_folder_of_images_becomes_named_predictions(tmp_path: Path) -> None:
    for number in range(6):
        whole = client(number, 8)
        assert whole.y is not None
        for place, (image, label) in enumerate(zip(whole.x, whole.y, strict=True)):
            folder = tmp_path / "clients" / f"c{number}" / (NAMES[label] if number % 3 else "")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(folder / f"{place}.png")

    def good(*words: object) -> str:
        result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    toml = f"""
model = "mlp"
method = {{ name = "fedavg" }}
server = {{ rounds = 2, cohort = 2 }}
[data]
source = "folder"
path = "{tmp_path}/clients"
validation_clients = 1
test_clients = 1
"""
    (tmp_path / "mine.toml").write_text(toml)
    good("train", tmp_path / "mine.toml", "--out", tmp_path / "run")
    found = json.loads(good("evaluate", tmp_path / "run", "--json"))
    assert found["class_names"] == list(NAMES)
    mine, model = tmp_path / "clients" / "c0", tmp_path / "me.safetensors"
    good("personalize", tmp_path / "run", "--input", mine, "--out", model)
    told = json.loads(good("predict", model, "--input", mine, "--json"))
    assert {*told["names"]} <= {*NAMES} and len(told["names"]) == 8
    points = zip(told["probabilities"], told["names"], told["files"], strict=True)
    lines = good("predict", model, "--input", mine).splitlines()
    assert lines == [f"{p:.3f} {name}  {file}" for p, name, file in points]


def test_clients_are_made_of_arrays_and_lists() -> None:
    x = np.arange(12, dtype=np.float64).reshape(4, 3)
    found = ClientData(x, np.array([0, 1, -1, 1], np.int8), "al", {"site": 1})
    assert torch.is_tensor(found.x) and torch.is_tensor(found.y)
    assert found.labeled and len(found) == 4 and found.unlabeled().y is None
    assert ClientData(x.tolist(), [0, 1, -1, 1]).x.tolist() == x.tolist()
    with pytest.raises(DataError, match="client 'al''s inputs must be numbers"):
        ClientData(np.array(["a"]), name="al")
    with pytest.raises(DataError, match="client 'al''s labels are no array"):
        ClientData(x, [[0], [1, 2]], "al")


def test_one_trains_on_clients_of_numpy_arrays(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    clients = [
        ClientData(draw.normal(size=(9, 3)), draw.integers(0, 2, 9), f"c{i}") for i in range(6)
    ]
    groups = (clients[:4], clients[4:5], clients[5:])
    found = Population(InputSpec((3,), "float32", 2), *groups)
    losses = [m["loss"] for m in flowdup.train_run(config(), tmp_path, population=found)]
    assert len(losses) == 2


@pytest.mark.parametrize("largest", [0.5, 7.5])
def test_a_measured_target_is_told_that_only_classes_are_learned(largest: float) -> None:
    client = ClientData(np.ones((3, 2)), np.array([0.1, 0.2, largest]), "al")
    with pytest.raises(DataError, match=r"client 'al' has labels .*: .*classification only"):
        InputSpec((2,), "float32", 4).check(client)
    flowdup.register_source("measured", lambda config, stream: {"train": [client]})
    try:
        with pytest.raises(DataError, match=r"client 'al' .*classification only"):
            load_population(DataConfig("measured"), Stream(0))
    finally:
        LOADERS.unregister("measured")


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("cnn", (32, 32, 3)),
        ("cnn-small", (28, 28, 1)),
        ("cnn-small", (24, 32, 3)),
        ("cnn-small", (32, 32, 4)),
        ("resnet18", (32, 32, 3)),
    ],
)
def test_images_with_channels_last_are_told_so(model: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"channels first .*: .*x\.transpose\(0, 3, 1, 2\)"):
        build_network(model, shape, 4, SPEC.reader())


@pytest.mark.parametrize(
    ("model", "shape"),
    [("cnn-small", (9, 128, 4)), ("resnet18", (9, 128, 1)), ("mlp", (32, 32, 3))],
)
def test_signals_of_such_shapes_are_read(model: str, shape: tuple[int, ...]) -> None:
    assert build_network(model, shape, 4, SPEC.reader()).size


def test_a_client_or_a_mean_for_channels_last_is_told_so() -> None:
    spec = InputSpec((3, 8, 8), "uint8", 4)
    x = np.zeros((2, 8, 8, 3), np.uint8)
    with pytest.raises(DataError, match=r"client 'al''s images of shape .* channels first"):
        spec.check(ClientData(x, name="al"))
    flowdup.register_source("last", lambda config, stream: {"train": [ClientData(x, [0, 1])]})
    try:
        with pytest.raises(DataError, match="channels first"):
            load_population(DataConfig("last", mean=(0.5,) * 3, std=(1.0,) * 3), Stream(0))
    finally:
        LOADERS.unregister("last")


def numbered(folder: Path, **settings: Any) -> Config:
    """Clients in files whose labels are numbers, and a run's settings for them."""
    for number in range(4):
        whole = client(number, 12)
        assert whole.y is not None
        folder.mkdir(exist_ok=True)
        np.savez(folder / f"c{number}.npz", x=whole.x.numpy(), y=whole.y.numpy())
    data = {"source": "folder", "path": str(folder), "validation_clients": 1, "test_clients": 1}
    return config(data=data | settings)


def test_numbers_get_names_by_a_setting_that_reach_a_prediction(tmp_path: Path) -> None:
    work = numbered(tmp_path / "clients", class_names=[*NAMES, "emu"])  # of which no point is
    list(flowdup.train_run(work, tmp_path / "run"))
    federation = flowdup.load(tmp_path / "run")
    assert federation.spec.inputs.class_names == (*NAMES, "emu")
    assert federation.personalize(client(0, 3).x).class_names == (*NAMES, "emu")
    assert flowdup.evaluate_run(tmp_path / "run")["class_names"] == [*NAMES, "emu"]


def test_a_run_may_get_names_later_and_no_others(tmp_path: Path) -> None:
    list(flowdup.train_run(numbered(tmp_path / "clients"), tmp_path / "run"))
    more = replace(config().server, rounds=3)
    named = replace(numbered(tmp_path / "clients", class_names=[*NAMES]), server=more)
    list(flowdup.train_run(named, tmp_path / "run", resume=True))
    assert flowdup.load(tmp_path / "run").spec.inputs.class_names == NAMES
    other = replace(numbered(tmp_path / "clients", class_names=[*NAMES[::-1]]), server=more)
    with pytest.raises(CheckpointError, match="another federation"):
        list(flowdup.train_run(other, tmp_path / "run", resume=True))


def test_digits_can_have_names_too() -> None:
    digits = DataConfig(points=20, train_clients=2, validation_clients=1, test_clients=1)
    words = tuple(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    found = load_population(replace(digits, class_names=words), Stream(0))
    assert found.spec.class_names == words and found.spec.classes == 10


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"class_names": ["a", "b", "a"]}, "has a name twice"),
        ({"class_names": ["a", ""]}, "or an empty one"),
        ({"class_names": ["a", "b", "c"]}, "they must lie between 0 and 2"),
        ({"class_names": ["a", "b", "c"], "classes": 4}, "3 names and there are 4 classes: give"),
        ({"class_names": "abcd"}, "must be a list"),
        ({"class_names": [1, 2, 3, 4]}, "must be a str"),
    ],
)
def test_names_that_do_not_fit_the_numbers_are_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(flowdup.FlowdupError, match=said):
        load_population(numbered(tmp_path / "clients", **settings).data, Stream(0))


def test_names_beside_those_of_the_data_are_refused_unless_they_are_the_same() -> None:
    found = replace(population(), spec=NAMED)
    flowdup.register_source("named", lambda config, stream: found)
    try:
        assert load_population(DataConfig("named", class_names=NAMES), Stream(0)).spec == NAMED
        with pytest.raises(ConfigError, match=r"names its classes itself \(ape.*: set data"):
            load_population(DataConfig("named", class_names=("a", "b", "c", "d")), Stream(0))
    finally:
        LOADERS.unregister("named")


CODES = (3, 17, 401, 73211009)


def coded(folder: Path, **settings: Any) -> Config:
    """The same clients with codes for labels, and one who has none of them."""
    folder.mkdir(parents=True)
    for number in range(5):
        x, y = client(number, 12).x, client(number, 12).labels
        codes = {"y": np.array(CODES)[y]} if number else {}
        np.savez(folder / f"c{number}.npz", x=x.numpy(), **codes)
    data = {"source": "folder", "path": str(folder), "validation_clients": 1, "test_clients": 1}
    return config(data=data | settings)


def test_codes_are_names_of_classes_from_the_data_to_a_prediction(tmp_path: Path) -> None:
    work, names = coded(tmp_path / "clients"), [*map(str, CODES)]
    list(flowdup.train_run(work, tmp_path / "run"))
    federation = flowdup.load(tmp_path / "run")
    assert federation.spec.inputs.class_names == tuple(names)
    model = federation.personalize(client(0, 9).x)
    assert {*model.predictions(client(0, 9).x)["names"]} <= {*names}
    own = flowdup.evaluate_run(tmp_path / "run")
    assert own["class_names"] == names
    x, y = client(9, 12).x.numpy(), client(9, 12).labels
    (tmp_path / "others").mkdir()
    for number, label in enumerate(y.tolist()):  # clients who lack most of the codes
        np.savez(tmp_path / "others" / f"o{number}.npz", x=x[:2], y=[CODES[label], -1])
    found = flowdup.evaluate_run(tmp_path / "run", source=tmp_path / "others")
    rows = torch.tensor(found["confusion"]["transductive"]).sum(1)
    assert rows.tolist() == torch.bincount(y, minlength=4).tolist()
    np.savez(tmp_path / "one.npz", x=x[:2], y=[3, 5])
    with pytest.raises(DataError, match=r"points of class '5', and the classes .* are 3, 17, 401"):
        flowdup.evaluate_run(tmp_path / "run", source=tmp_path / "one.npz")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_codes_in_a_table_are_names_too(tmp_path: Path, form: str) -> None:
    rows = [f"u{c},{CODES[point % 3]},{point}.5" for c in range(4) for point in range(6)]
    (tmp_path / "all.csv").write_text("\n".join(["client,label,x1", *rows]))
    csv, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(csv.read_csv(tmp_path / "all.csv"), tmp_path / "all.parquet")
    path = str(tmp_path / f"all.{form}")
    inputs: dict[str, Any] = {"input_columns": ("x1",), "validation_clients": 1, "test_clients": 1}
    own = DataConfig("table", path=path, **inputs)
    assert load_population(own, Stream(0)).spec.class_names == ("3", "17", "401")
    counted = load_population(replace(own, classes=402), Stream(0))
    assert counted.spec.classes == 402 and counted.spec.class_names == ()
    assert counted.train[0].labels[:3].tolist() == [3, 17, 401]


@pytest.mark.parametrize(
    ("labels", "classes", "names"),
    [
        ((0, 1, 2), 3, ()),
        ((1, 2, 3), 4, ()),  # counted from 1
        ((0, 1, 4), 5, ()),
        ((1, 1), 2, ()),  # one class
        ((0, 5), 2, ("0", "5")),
        ((2, 9, 10), 3, ("2", "9", "10")),
    ],
)
def test_numbers_are_codes_where_half_of_those_up_to_the_largest_are_missing(
    tmp_path: Path, labels: tuple[int, ...], classes: int, names: tuple[str, ...]
) -> None:
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "c.npz", x=np.ones((len(labels) + 1, 2)), y=[*labels, -1])
    own = load_population(DataConfig("folder", path=str(tmp_path)), Stream(0))
    assert (own.spec.classes, own.spec.class_names) == (classes, names)
    numbers = [names.index(str(y)) if names else y for y in labels]
    assert own.train[0].labels.tolist() == [*numbers, -1]


def test_labels_below_none_are_no_codes(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "c.npz", x=np.ones((3, 2)), y=[-7, 3, 401])
    with pytest.raises(DataError, match="labels from -7 to 401"):
        load_population(DataConfig("folder", path=str(tmp_path)), Stream(0))
