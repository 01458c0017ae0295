"""Where a run begins: from another run or a model file, if they fit."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small import SPEC, client, population
from staged import shaky, train

from flowdup import Population, evaluate_run, load, train_run
from flowdup.data import MEMORY, ClientData, DataConfig, InputSpec
from flowdup.errors import ConfigError, FlowdupError
from flowdup.models import Weights
from flowdup.personalize import PersonalModel
from flowdup.run import Simulation
from flowdup.run.start import check_reading, load_start


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to begin from, of another seed."""
    out = tmp_path_factory.mktemp("other")
    train(shaky(2, seed=4), out)
    return out


def begins_at(config: Any, people: Population | None = None) -> Weights:
    return Simulation(config, people or population(), stage=0).initial_state().psi


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], w) for n, w in b.items())


def test_a_run_begins_with_what_another_has_kept(other: Path) -> None:
    learned = load(other).psi
    assert equal(begins_at(shaky(start=str(other))), learned)
    assert not equal(begins_at(shaky()), learned)


def test_a_run_begins_from_a_model_file(other: Path, tmp_path: Path) -> None:
    model = load(other).personalize(client(30, 5).x)
    model.save(tmp_path / "me.safetensors")
    started = begins_at(shaky(start=str(tmp_path / "me.safetensors")))
    assert equal(started, {n: p.detach() for n, p in model.module.named_parameters()})


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that is by chance better than what a shaky one makes of it."""
    out = tmp_path_factory.mktemp("good")
    train(shaky(4, seed=7, client={"batch_size": 10, "optimizer": {"lr": 0.01}}), out)
    return str(out)


@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_run_that_makes_a_model_worse_keeps_the_model(
    keep: str, good: str, tmp_path: Path
) -> None:
    config = shaky(4, start=good, run={"evaluate_every": 1, "keep": keep})
    rows = train(config, tmp_path)
    assert rows[0]["start_accuracy"] > max(row["validation_accuracy"] for row in rows)
    assert load(tmp_path).round == (0 if keep == "best" else 4)
    kept = equal(load(tmp_path).psi, load_start(Path(good), "mlp", SPEC)[0])
    assert kept == (keep == "best")


def test_patience_counts_from_the_model_that_a_run_began_from(good: str, tmp_path: Path) -> None:
    patient = shaky(4, start=good, run={"evaluate_every": 1, "patience": 2})
    assert len(train(patient, tmp_path)) == 2


def test_what_a_run_began_from_may_be_gone_when_it_goes_on(other: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other"
    shutil.copytree(other, copy)
    config = shaky(start=str(copy))
    assert len(train(replace(config, server=shaky(2).server), tmp_path / "run")) == 2
    shutil.rmtree(copy)
    rest = train(config, tmp_path / "run", resume=True)
    whole = train(replace(config, start=str(other)), tmp_path / "whole")
    assert [row["loss"] for row in rest] == [row["loss"] for row in whole[2:]]
    assert evaluate_run(tmp_path / "run", population())["cost"]["bytes_once"] > 0


def test_a_run_does_not_go_on_as_if_it_had_begun_elsewhere(other: Path, tmp_path: Path) -> None:
    train(shaky(1), tmp_path)
    with pytest.raises(ConfigError, match=r"start is .* in the settings given and \"\" in the"):
        train(shaky(2, start=str(other)), tmp_path, resume=True)


def test_a_relative_start_means_the_same_from_any_folder(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(other.parent)
    train(shaky(1, start=other.name), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert len(train(shaky(2, start=str(other)), tmp_path / "run", resume=True)) == 1


OTHERS = {
    "model": ("cnn-small", SPEC),
    "shape": ("mlp", replace(SPEC, shape=(1, 4, 16))),
    "classes": ("mlp", replace(SPEC, classes=5)),
    "dtype": ("mlp", replace(SPEC, dtype="float32")),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_run_of_another_model_or_for_other_inputs_is_no_start(
    what: str, other: Path, tmp_path: Path
) -> None:
    model, inputs = OTHERS[what]
    with pytest.raises(ConfigError, match=f"cannot start from .*: its {what} is .* there and"):
        load_start(other, model, inputs)
    file = tmp_path / "me.safetensors"
    load(other).personalize(client(30, 5).x).save(file)
    with pytest.raises(ConfigError, match=f"cannot start from .*: its {what} is .* there and"):
        load_start(file, model, inputs)


def test_a_table_is_no_start_for_images_whatever_its_columns_are_called(tmp_path: Path) -> None:
    weights = begins_at(shaky())
    table = replace(SPEC, columns=tuple(f"column {i}" for i in range(64)))
    PersonalModel("mlp", table, weights).save(tmp_path / "me.safetensors")
    with pytest.raises(ConfigError, match=r"me.safetensors: its shape is \(1, 8, 8\) there and"):
        load_start(tmp_path / "me.safetensors", "mlp", replace(SPEC, shape=(1, 4, 4)))


def read_otherwise(mean: float) -> Population:
    return replace(population(), spec=replace(SPEC, mean=(mean,)))


@pytest.mark.parametrize("later", [False, True])
def test_inputs_are_read_as_the_start_reads_them(other: Path, tmp_path: Path, later: bool) -> None:
    """Other clients have another mean and std; the model learned with those of the first."""
    changes = {"before": [{"server": {"rounds": 2}}]} if later else {}
    config, people = shaky(4, start=str(other), **changes), read_otherwise(0.9)

    def trained(name: str, people: Population) -> list[Any]:
        return [row["loss"] for row in train_run(config, tmp_path / name, False, people)]

    assert trained("run", people) == trained("same", population())
    assert load(tmp_path / "run").spec.inputs == SPEC
    evaluated = [evaluate_run(tmp_path / "run", people) for people in (people, population())]
    assert evaluated[0]["metrics"] == evaluated[1]["metrics"]


def test_a_run_that_reads_as_its_start_does_goes_on_to_the_same_bits(
    other: Path, tmp_path: Path
) -> None:
    config, people = shaky(5, start=str(other)), read_otherwise(0.9)
    rows = train_run(config, tmp_path / "run", False, people, stop=after(2))
    assert len(list(rows)) == 2
    rest = list(train_run(config, tmp_path / "run", True, people))
    whole = list(train_run(config, tmp_path / "whole", False, people))
    assert [row["loss"] for row in rest] == [row["loss"] for row in whole[2:]]
    assert equal(load(tmp_path / "run").psi, load(tmp_path / "whole").psi)


def after(rounds: int) -> Callable[[], bool]:
    """A `stop` that says so after so many rounds."""
    asked = iter(range(rounds))
    return lambda: next(asked, None) is None


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        ({"mean": (0.9,), "std": (0.4,)}, True),
        ({"normalize": False}, True),
        ({"mean": (0.3,), "std": (0.4,)}, False),
        ({}, False),
        ({"mean": (0.9,), "std": (0.4,), "source": MEMORY}, False),  # where no setting counts
    ],
)
def test_another_reading_that_is_asked_for_is_refused(data: dict[str, Any], refused: bool) -> None:
    told = pytest.raises(ConfigError, match=r"other data.mean and data.std than its own, \(0.3")
    with told if refused else nullcontext():
        check_reading(DataConfig(**{"source": "folder", "path": "clients"} | data), "it", SPEC)


@pytest.mark.parametrize("given", [{}, {"mean": [0.9], "std": [0.4]}])
def test_a_folder_of_clients_is_read_as_the_start_reads_it(
    given: dict[str, Any], other: Path, tmp_path: Path
) -> None:
    for n, someone in enumerate(population().train):
        np.savez(tmp_path / f"{n}.npz", x=someone.x, y=np.resize(np.arange(4), len(someone.x)))
    data = {"source": "folder", "path": str(tmp_path), "validation_clients": 2, "test_clients": 1}
    config = shaky(start=str(other), data=data | given)
    if given:
        with pytest.raises(ConfigError, match=r"with other data\.mean"):
            Simulation(config, stage=0)
    else:
        assert Simulation(config, stage=0).population.spec.mean == SPEC.mean


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A file of nothing but weights, as any program may write it."""
    save_file(begins_at(shaky(seed=8)), tmp_path / "plain.safetensors")
    return tmp_path / "plain.safetensors"


@pytest.mark.parametrize("data", [{}, {"source": "folder", "path": "clients", "normalize": False}])
def test_a_run_begins_from_weights_of_anybodys(data: dict[str, Any], plain: Path) -> None:
    """They say nothing of how inputs are read, so these are read as the clients' own are."""
    people = read_otherwise(0.9)
    simulation = Simulation(shaky(start=str(plain), data=data), people, stage=0)
    assert equal(simulation.initial_state().psi, begins_at(shaky(seed=8)))
    assert simulation.federation.inputs == people.spec


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_of_any_precision_are_read(dtype: torch.dtype, plain: Path) -> None:
    weights = load_file(plain)
    save_file({n: w.to(dtype) for n, w in weights.items()}, plain)
    found, _ = load_start(plain, "mlp", SPEC)
    assert equal(found, {n: w.to(dtype).float() for n, w in weights.items()})


def test_weights_with_other_names_or_shapes_are_no_start(plain: Path) -> None:
    weights = load_file(plain)
    name = next(iter(weights))
    wrong = {
        f"its '{name}' .*the model is 'mlp'.* is \\(3, 3\\) there": weights
        | {name: torch.ones(3, 3)},
        "'another' is no parameter of the model 'mlp', which has 1.weight, .* without buffers": (
            weights | {"another": torch.ones(2)}
        ),
        f"its '{name}' .* is missing there": {n: w for n, w in weights.items() if n != name},
        "it holds NaN": {n: w * torch.nan for n, w in weights.items()},
        "its '1.weight' is of type I64": {n: w.long() for n, w in weights.items()},
    }
    for sentence, tensors in wrong.items():
        save_file(tensors, plain)
        with pytest.raises(FlowdupError, match=sentence):
            load_start(plain, "mlp", SPEC)


def test_a_file_of_another_kind_is_refused_with_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("seed = 1")
    with pytest.raises(FlowdupError, match=r"cannot read weights in .*mine.toml .*as safetensors"):
        load_start(tmp_path / "mine.toml", "mlp", SPEC)


def test_a_start_that_does_not_fit_leaves_no_folder(other: Path, tmp_path: Path) -> None:
    wide = replace(SPEC, shape=(1, 4, 16))

    def reshaped(clients: Any) -> list[ClientData]:
        return [ClientData(c.x.reshape(-1, 1, 4, 16), c.y, c.name, c.traits) for c in clients]

    ours = population()
    groups = map(reshaped, (ours.train, ours.validation, ours.test))
    with pytest.raises(ConfigError, match="its shape is"):
        list(train_run(shaky(start=str(other)), tmp_path / "run", False, Population(wide, *groups)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("start", "sentence"),
    [
        ("nothing", "`start` names .*nothing, which does not exist: give a run folder"),
        ("nothing.safetensors", "which does not exist"),
        ("empty", "there is no checkpoint"),
    ],
)
def test_a_start_that_is_not_there_is_one_sentence(
    start: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FlowdupError, match=sentence):
        train(shaky(start=str(tmp_path / start)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_start_of_a_method_without_a_model_for_everyone_is_one_sentence(tmp_path: Path) -> None:
    pefll = {"name": "pefll", "hypernetwork": {"embedding": 6, "hidden": 4}}
    train(shaky(1, method=pefll, client={"batch_size": 10}), tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"cannot start from .*other: .*learns no model for everyone"
    ):
        train(shaky(start=str(tmp_path / "other")), tmp_path / "run")


def test_a_model_file_of_one_precision_more_is_read(tmp_path: Path) -> None:
    weights = begins_at(shaky())
    inputs: InputSpec = SPEC
    model = PersonalModel("mlp", inputs, weights).double()
    model.save(tmp_path / "me.safetensors")
    assert equal(load_start(tmp_path / "me.safetensors", "mlp", inputs)[0], weights)
