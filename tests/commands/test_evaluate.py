"""`flowdup evaluate` on other clients, on a group, on other data, and on a saved personal model."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands.here import flowdup
from PIL import Image
from sklearn.metrics import confusion_matrix, f1_score

from flowdup import evaluate_model, evaluate_run, load, load_model
from flowdup.config import read_config
from flowdup.data import ClientData, Population, register_source
from flowdup.data.loading import LOADERS
from flowdup.errors import ConfigError, FlowdupError
from flowdup.run import train_run

NAMES = ("ape", "bee", "cat")


def draw(number: int, points: int = 30) -> tuple[Any, Any]:
    """Images whose brightness tells the class, and its name."""
    random = np.random.default_rng(number)
    y = random.integers(0, 3, points)
    x = random.integers(0, 60, (points, 1, 6, 6)) + 60 * y[:, None, None, None]
    return x.astype(np.uint8), np.array(NAMES)[y]


def write(folder: Path, numbers: range) -> Path:
    folder.mkdir(parents=True)
    for number in numbers:
        x, y = draw(number)
        np.savez(folder / f"c{number}.npz", x=x, y=y, site=number % 2)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    write(folder / "clients" / "train", range(6))
    write(folder / "clients" / "validation", range(6, 9))
    write(folder / "clients" / "test", range(9, 13))
    table = {
        "model": "mlp",
        "data": {"source": "folder", "path": str(folder / "clients")},
        "method": {"name": "fedavg"},
        "client": {"optimizer": {"lr": 0.3}, "clip": 1.0},
        "server": {"rounds": 30, "cohort": 6},
        "run": {"evaluate_every": 10},
        "engine": {"device": "cpu"},
    }
    list(train_run(read_config(table), folder / "run"))
    x, _ = draw(9)
    load(folder / "run").personalize(x).save(folder / "me.safetensors")
    return folder


def good(*words: str | Path) -> dict[str, Any]:
    ended = flowdup("evaluate", *words, "--json")
    assert ended.code == 0, ended.error
    found: dict[str, Any] = json.loads(ended.out)
    return found


def refused(*words: str | Path) -> str:
    ended = flowdup("evaluate", *words)
    assert ended.code == 2 and ended.error.count("\n") == 1 and not ended.out, ended.error
    assert ended.error.startswith("error: ") and ":" in ended.error[7:]
    return ended.error


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two evaluations found the same, whoever it was about."""
    return all(one[key] == other[key] for key in ("metrics", "percentiles", "confusion"))


def test_a_group_of_the_runs_own_clients_is_scored_and_nothing_written(home: Path) -> None:
    run = home / "run"
    test = good(run)
    stored = (run / "evaluation.json").read_bytes()
    assert test["group"] == "test" and json.loads(stored) == test
    found = good(run, "--group", "validation")
    assert found["group"] == "validation"
    assert [c["name"] for c in found["clients"]] == ["c6", "c7", "c8"]
    assert found["clients"][0]["traits"] == {"site": 0}
    assert len(good(run, "--group", "train")["clients"]) == 6
    assert (run / "evaluation.json").read_bytes() == stored
    assert good(run, "--group", "test") == test


def test_validation_is_scored_as_in_training(home: Path) -> None:
    rows = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    found = good(home / "run", "--group", "validation")
    row = next(row for row in rows if row["round"] == found["round"])
    assert found["metrics"]["transductive"]["accuracy"]["mean"] == row["validation_accuracy"]


def test_clients_that_took_part_in_training_are_told(home: Path, tmp_path: Path) -> None:
    run, clients = home / "run", home / "clients"
    assert good(run, "--input", clients / "test")["trained_on"] == 0
    assert good(run, "--input", clients)["trained_on"] == 6  # of all groups' 13
    assert (
        "beware: 6 of them took part in training"
        in flowdup("evaluate", run, "--input", clients).out
    )
    x, y = draw(0)
    np.savez(tmp_path / "other name.npz", x=x, y=y)
    told = flowdup("evaluate", run, "--input", tmp_path / "other name.npz").out
    assert "beware: they took part in training" in told
    assert "beware" not in flowdup("evaluate", run, "--input", clients / "test").out
    shutil.copytree(run, tmp_path / "listless")
    listing = tmp_path / "listless" / "clients.json"
    checkpoint = listing.with_name("checkpoint")
    for change in (
        lambda: listing.write_text("[" * 10_000),
        listing.unlink,
        lambda: shutil.rmtree(checkpoint),  # the best round's alone is left
    ):
        change()
        assert good(tmp_path / "listless", "--input", clients)["trained_on"] is None


def test_other_clients_of_a_folder_get_the_numbers_of_the_runs_own(home: Path) -> None:
    run, clients = home / "run", home / "clients"
    assert same(good(run, "--input", clients / "test"), good(run))
    found = good(run, "--input", clients)  # all groups
    assert len(found["clients"]) == 13 and found["input"] == str(clients)
    assert same(good(run, "--input", clients, "--group", "test"), good(run))


def test_clients_without_labels_are_not_counted_as_scored(home: Path, tmp_path: Path) -> None:
    run, model = home / "run", home / "me.safetensors"
    clients = write(tmp_path / "clients", range(9, 12))
    assert "after round 30, 3 clients; their" in flowdup("evaluate", run, "--input", clients).out
    np.savez(clients / "silent.npz", x=draw(12)[0])
    for path in (run, model):
        words = " ".join(flowdup("evaluate", path, "--input", clients).out.split())
        assert " 4 clients, 3 of them with labels" in words


def test_a_client_without_some_classes_has_the_classes_of_the_run(
    home: Path, tmp_path: Path
) -> None:
    """A client's names alone would number its classes otherwise."""
    x, y = draw(20, 60)
    np.savez(tmp_path / "some.npz", x=x[y != "ape"], y=y[y != "ape"])
    found = good(home / "run", "--input", tmp_path)
    assert found["metrics"]["transductive"]["accuracy"]["mean"] > 60
    matrix = found["confusion"]["transductive"]
    assert not any(matrix[0]) and sum(matrix[1]) == (y == "bee").sum()
    assert same(good(home / "run", "--input", tmp_path / "some.npz"), found)


def test_images_and_tables_are_read_for_a_run_on_arrays(home: Path, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x, y = draw(9)
    for place, (image, name) in enumerate(zip(x, y, strict=True)):
        folder = tmp_path / "images" / "c9" / str(name)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(folder / f"{place}.png")
    order = np.argsort(y, kind="stable")  # as folders have them
    (tmp_path / "arrays").mkdir()
    np.savez(tmp_path / "arrays" / "c9.npz", x=x[order], y=y[order])
    wanted = good(home / "run", "--input", tmp_path / "arrays")["confusion"]["transductive"]
    assert good(home / "run", "--input", tmp_path / "images")["confusion"]["transductive"] == wanted
    own = good(home / "run", "--input", tmp_path / "images" / "c9")  # one client, by class
    assert own["confusion"]["transductive"] == wanted and len(own["clients"]) == 1
    columns = {"who": ["c9"] * 30, "kind": y.tolist(), "x": x.reshape(30, 36).tolist()}
    pixels = pa.array(columns["x"], pa.list_(pa.uint8()))
    pq.write_table(pa.table(columns | {"x": pixels}), tmp_path / "table.parquet")
    given = ("--input", tmp_path / "table.parquet", "--set", "data.client_column=who")
    named = ("--set", "data.label_column=kind", "--set", "data.shape=[1,6,6]")
    assert good(home / "run", *given, *named)["confusion"]["transductive"] == wanted
    assert np.trace(wanted) > 20


def test_other_settings_of_the_data_make_other_clients(home: Path, tmp_path: Path) -> None:
    write(tmp_path / "other" / "train", range(30, 31))
    write(tmp_path / "other" / "test", range(31, 33))
    found = good(home / "run", "--set", f"data.path={tmp_path / 'other'}")
    assert [c["name"] for c in found["clients"]] == ["c31", "c32"]
    assert same(found, good(home / "run", "--input", tmp_path / "other" / "test"))
    assert found["settings"] == [f"data.path={tmp_path / 'other'}"]


def test_a_saved_model_is_scored_as_it_is(home: Path) -> None:
    model, clients = load_model(home / "me.safetensors"), home / "clients" / "test"
    found = good(home / "me.safetensors", "--input", clients)
    assert list(found["metrics"]) == ["fixed_model"] and found["class_names"] == list(NAMES)
    labels: list[str] = []
    answers: list[str] = []
    accuracies, scores = [], []
    for number in range(9, 13):
        x, y = draw(number)
        names = np.array(model.predictions(x)["names"])
        labels, answers = [*labels, *y], [*answers, *names]
        accuracies.append(100 * float((names == y).mean()))
        scores.append(100 * f1_score(y, names, average="macro"))
    table, shares = (found[key]["fixed_model"] for key in ("metrics", "percentiles"))
    assert table["accuracy"]["mean"] == pytest.approx(np.mean(accuracies))
    assert table["macro_f1"]["mean"] == pytest.approx(np.mean(scores))
    wanted = np.percentile(accuracies, [10, 25, 50, 75, 90])
    assert list(shares["accuracy"].values()) == pytest.approx(wanted.tolist())
    assert list(shares["accuracy"]) == ["p10", "p25", "p50", "p75", "p90"]
    by_hand = confusion_matrix(labels, answers, labels=NAMES)
    assert found["confusion"]["fixed_model"] == by_hand.tolist()
    assert evaluate_model(home / "me.safetensors", clients) == found


def test_both_kinds_print_names_and_all_tables(home: Path) -> None:
    found = good(home / "me.safetensors", "--input", home / "clients")["confusion"]["fixed_model"]
    printed = flowdup("evaluate", home / "me.safetensors", "--input", home / "clients").out
    assert (
        "percentiles over clients" in printed and "macro f1" in printed and "13 clients" in printed
    )
    rows = [line.split() for line in printed.splitlines()]
    assert list(NAMES) in rows
    for name, row in zip(NAMES, found, strict=True):
        assert [name, *map(str, row)] in rows
    printed = flowdup("evaluate", home / "run", "--group", "train").out
    assert (
        "6 train clients" in printed
        and "held-out" in printed
        and list(NAMES) in [line.split() for line in printed.splitlines()]
    )


def test_many_classes_print_what_is_confused_most(tmp_path: Path) -> None:
    table = {
        "model": "mlp",
        "data": {"source": "many", "validation_clients": 0, "test_clients": 3},
        "method": {"name": "fedavg"},
        "server": {"rounds": 1, "cohort": 2},
    }
    y = torch.arange(40) % 14
    clients = [ClientData(torch.randn(40, 3), y, f"c{i}") for i in range(7)]
    register_source("many", lambda config, stream: clients)
    try:
        list(train_run(read_config(table), tmp_path / "run"))
        ended = flowdup("evaluate", tmp_path / "run")
    finally:
        LOADERS.unregister("many")
    assert "most frequent confusions, held-out" in ended.out and "taken for" in ended.out


def test_what_cannot_be_evaluated_is_one_sentence_with_a_remedy(home: Path, tmp_path: Path) -> None:
    run, model, clients = home / "run", home / "me.safetensors", home / "clients"
    assert "no group 'all': choose train, validation or test" in refused(run, "--group", "all")
    assert "only data settings" in refused(run, "--set", "server.rounds=3")
    assert "there is no" in refused(run, "--input", tmp_path / "nowhere")
    assert "give some with --input" in refused(model)
    assert "give some with --input" in refused(model, "--set", "data.points=3")
    assert "is a model already" in refused(model, "--input", clients, "--set-sizes", "1")
    flat = clients / "test"
    assert "no groups, and not 'test'" in refused(run, "--input", flat, "--group", "test")
    shutil.copy(model, tmp_path / "broken.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(model.read_bytes()[:-5])
    assert "personalize again" in refused(tmp_path / "broken.safetensors", "--input", flat)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"y": None}, "no labels to compare with: store some, or name their column"),
        ({"y": np.array(["emu"] * 30)}, "class 'emu', and the classes that were learned are ape"),
        ({"y": np.full(30, 3)}, "they must lie between 0 and 2"),
        ({"y": np.linspace(0, 1, 30)}, "classification only"),
        ({"x": np.zeros((30, 6, 6, 1), np.uint8)}, "channels first"),
        ({"x": np.zeros((30, 6, 6, 3), np.uint8)}, "channels first"),
        ({"x": np.zeros((30, 6, 6), np.uint8)}, r"add the axis of channels, x[:, None] in NumPy"),
        ({"x": np.zeros((30, 3, 6, 6), np.uint8)}, "of 3 channels, and 1 is what is read"),
        ({"x": np.zeros((30, 1, 9, 9), np.uint8)}, "reads (1, 6, 6)"),
        ({"x": np.zeros((30, 1, 6, 6))}, "reads uint8 images"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_clients_that_do_not_fit_are_told_why(
    home: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    x, y = draw(1)
    arrays = {name: a for name, a in ({"x": x, "y": y} | change).items() if a is not None}
    np.savez(tmp_path / "c.npz", **arrays)
    assert said in refused(home / "run", "--input", tmp_path)
    assert said in refused(home / "me.safetensors", "--input", tmp_path / "c.npz")


def test_in_python_clients_are_given_in_one_way_only(home: Path) -> None:
    spec = load(home / "run").spec.inputs
    with pytest.raises(ConfigError, match="give no source or settings beside it"):
        evaluate_run(home / "run", Population(spec, [], [], []), source=home / "clients")
    with pytest.raises(FlowdupError, match="there are no"):
        evaluate_run(home / "run", Population(spec, [], [], []), group="validation")


def test_names_without_end_are_cut_in_sentences(home: Path, tmp_path: Path) -> None:
    x, _ = draw(1)
    np.savez(tmp_path / "c.npz", x=x, y=np.array(["9" * 5000] * 30))
    assert len(refused(home / "run", "--input", tmp_path)) < 400
    pytest.importorskip("pyarrow")
    (tmp_path / "c.csv").write_text(f"{'n' * 5000},b,label\nx,1,ape\ny,2,bee\n")
    assert len(refused(home / "run", "--input", tmp_path / "c.csv")) < 400


def told(run: Path, folder: Path, clients: list[dict[str, Any]]) -> str:
    """What is printed of these clients."""
    folder.mkdir()
    for number, arrays in enumerate(clients):
        np.savez(folder / f"c{number}.npz", **arrays)
    ended = flowdup("evaluate", run, "--input", folder)
    assert ended.code == 0, ended.error
    return ended.out


def test_clients_of_one_point_have_no_empty_matrix_but_a_reason(home: Path, tmp_path: Path) -> None:
    points = [dict(zip("xy", draw(number, 1), strict=True)) for number in range(40, 46)]
    own = told(home / "run", tmp_path / "one", points)
    why = "no held-out figures: the clients with labels have too few points to be halved"
    assert why in own and "confusion" not in own
    x, y = draw(53, 8)
    longer = told(home / "run", tmp_path / "longer", [*points, {"x": x, "y": y}])
    title = "confusion matrix, held-out: points of a class (rows) by prediction (columns)"
    assert title in longer.splitlines() and "too few" not in longer
    gaps = np.where(np.arange(8) < 1, y, "")  # of eight points one has a label
    clients = [{"x": x, "y": np.roll(gaps, shift)} for shift in range(8)]
    for number, client in enumerate(clients):  # which of them is scored, the seed says
        own = told(home / "run", tmp_path / str(number), [client])
        assert ("no point with a label is in the half" in own) != ("confusion matrix" in own)
