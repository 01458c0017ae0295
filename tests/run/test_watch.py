"""While a run trains it warns, once each, of what the doctor would find; bits stay the same."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands.here import flowdup, flowdup_on_terminal
from npz_clients import balanced, write_clients
from small import METHODS, population
from staged import shaky

from flowdup import load
from flowdup.config import Config, read_config
from flowdup.errors import ConfigError, TrainingWarning
from flowdup.optimizers import OptimizerConfig
from flowdup.run import train_run
from flowdup.run.findings import find_dominating_class, find_overfitting
from flowdup.run.simulation import Simulation
from flowdup.run.watch import TrainingWatch

FEDAVG: dict[str, Any] = {"name": "fedavg"}
FLOWDUP: dict[str, Any] = {"name": "flowdup", "subspace": {"k": 100}}


def config(clients: Path | None, method: dict[str, Any] = FEDAVG, **changes: Any) -> Config:
    table: dict[str, Any] = {
        "model": "mlp",
        "method": method,
        "client": {"optimizer": {"lr": 0.1}},
        "server": {"rounds": 40, "cohort": 5, "optimizer": {"lr": 0.02}},
        "run": {"evaluate_every": 10},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    if clients:
        table["data"] = {"source": "folder", "path": str(clients), "classes": 2}
    return read_config(table | changes)


def told(work: Config, out: Path, **given: Any) -> dict[int, list[str]]:
    """The warnings by the round before whose metrics they came."""
    found: dict[int, list[str]] = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for metrics in train_run(work, out, **given):
            texts = [str(w.message) for w in seen if w.category is TrainingWarning]
            if texts:
                found[metrics["round"]] = texts
                assert all(w.filename == __file__ for w in seen if w.category is TrainingWarning)
            seen.clear()
    return found


def only_zeros(draw: np.random.Generator, group: str) -> Any:
    """Training clients know one class, the others have two."""
    return np.arange(20) % 2 if group != "train" else np.zeros(20, np.int64)


def test_a_healthy_run_is_told_nothing(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", balanced)
    assert not told(config(tmp_path / "clients", FLOWDUP), tmp_path / "run")


def test_inputs_that_lose_their_digits_are_told_once(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", balanced)
    for file in (tmp_path / "clients").rglob("*.npz"):
        arrays = dict(np.load(file))
        arrays["x"] = arrays["x"] + np.array([0.0, 1e9, 0.0])
        np.savez(file, **arrays)
    work = config(tmp_path / "clients", FLOWDUP)
    found = told(work, tmp_path / "run")
    assert [*found] == [1] and found[1][0].startswith("round 1: inputs 1 differ by a millionth")
    assert "take the same number off" in found[1][0] and len(found[1]) == 1
    said = flowdup("doctor", tmp_path / "run").out
    assert said.startswith("digits-lost: inputs 1 differ by a millionth of their size (1e+09)")


def test_one_class_for_everything_is_told_once_where_it_first_shows(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", only_zeros)
    found = told(config(tmp_path / "clients"), tmp_path / "run")
    assert list(found) == [20] and len(found[20]) == 1  # the first after early rounds, and no more
    assert found[20][0].startswith("round 20: 100% of all predictions for validation clients are")
    assert "try" in found[20][0]


def test_corrected_predictions_are_looked_at_too(tmp_path: Path) -> None:
    """Calibration on validation clients mends the class that dominates, so nothing is told."""
    write_clients(tmp_path / "clients", balanced)
    work = config(tmp_path / "clients", FEDAVG | {"correction": "em"})
    simulation = Simulation(work)
    for _ in simulation.rounds(simulation.initial_state()):
        pass
    assert simulation.predicted is not None
    assert int(simulation.predicted.sum()) == 5 * 20  # every labeled point once


def unlabeled_validation(draw: np.random.Generator, group: str) -> Any:
    return np.full(20, -1) if group == "validation" else balanced(draw, group)


def test_what_needs_validation_clients_is_told_that_none_has_labels(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", unlabeled_validation)
    plain = config(tmp_path / "clients")
    assert not told(plain, tmp_path / "plain")  # its last round counts, which nobody forbade
    patient = replace(plain, run=replace(plain.run, patience=3))
    corrected = config(tmp_path / "clients", FEDAVG | {"correction": "em"})
    for name, work in (("patient", patient), ("corrected", corrected)):
        found = told(work, tmp_path / name)
        assert list(found) == [1] and "no validation client has a label" in found[1][0]
        assert ("run.patience ends no stage" in found[1][0]) == (name == "patient")
        assert ("models are not calibrated" in found[1][0]) == (name == "corrected")


ROWS = [{"round": n, "loss": 1.0 / n, "validation_accuracy": 90.0 - n} for n in (1, 2)]
CHANGES = ("client.shift", "client.mirror", "client.rotate_batches")
REMEDIES = ("run.keep", "run.patience", "method.subspace.k", *CHANGES)


def test_nobody_is_advised_what_a_run_has() -> None:
    (found,) = find_overfitting(ROWS, config(None, FLOWDUP, run={"keep": "last"}))
    assert all(remedy in found.remedy for remedy in REMEDIES)
    client = {"shift": 1, "mirror": True, "rotate_batches": True}
    work = config(None, FEDAVG, client=client, run={"keep": "best", "patience": 3})
    (found,) = find_overfitting(ROWS, work)
    assert found.remedy == "try more clients, or fewer rounds"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_nobody_is_advised_what_a_method_lacks_or_has(name: str) -> None:
    def advice(correction: str) -> str:
        simulation = Simulation(
            shaky(1, method=METHODS[name] | {"correction": correction}), population()
        )
        labels = torch.full((simulation.population.spec.classes,), 10.0)
        predicted = labels.clone()
        predicted[0] = 100
        (found,) = find_dominating_class(predicted, labels, simulation)
        return found.remedy

    plain = advice("none")
    adjusted = METHODS[name]["name"] in ("fedavg-la", "fedavg-pseudo", "flowdup-plus")
    assert ("fedavg-la" in plain) != adjusted
    if "method.correction" in plain:
        assert "method.correction" not in advice("em")
    else:
        with pytest.raises(ConfigError, match=r"choose method\.correction = 'none'"):
            advice("em")


def test_embeddings_that_are_alike_are_told(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", balanced, move=0.0)
    found = told(config(tmp_path / "clients", FLOWDUP), tmp_path / "run")
    texts = [text for own in found.values() for text in own if "embeddings r(X)" in text]
    assert (
        len(texts) == 1 and texts[0].startswith("round 20: ") and "5 clients are alike" in texts[0]
    )


def test_gradients_are_told_to_be_clipped_only_if_they_are_throughout(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", balanced)
    work = config(tmp_path / "clients", client={"optimizer": {"lr": 0.1}, "clip": 1e-4})
    slow = replace(work.server, optimizer=replace(work.server.optimizer, lr=1e-6))
    found = told(replace(work, server=slow), tmp_path / "slow")
    clipped = {n: text for n, own in found.items() for text in own if "client.clip" in text}
    assert list(clipped) == [30] and "longer than client.clip = 0.0001" in clipped[30]
    assert not told(work, tmp_path / "run")  # at first they are longer, but not in the end


def test_over_fitting_is_told_from_the_metrics_of_a_resumed_run_too(tmp_path: Path) -> None:
    rows = [{"round": n, "loss": 1.0 / n, "validation_accuracy": 90.0 - n} for n in (1, 2)]
    simulation = Simulation(config(None), population())
    watch, state = TrainingWatch(rows), replace(simulation.initial_state(), round=3, began=3)
    with pytest.warns(TrainingWarning, match="round 3: since round 1 accuracy on validation"):
        watch.add(simulation, state, {"round": 3, "loss": 0.1, "validation_accuracy": 80.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.add(simulation, state, {"round": 4, "loss": 0.1, "validation_accuracy": 80.0})
        TrainingWatch().add(
            simulation, state, {"round": 3, "loss": 0.1, "validation_accuracy": 8.0}
        )


def test_a_stage_that_is_resumed_is_not_called_clipped_throughout(tmp_path: Path) -> None:
    """Nobody has looked at the gradients of its first evaluations."""
    write_clients(tmp_path / "clients", balanced)
    work = config(tmp_path / "clients", client={"optimizer": {"lr": 0.1}, "clip": 1e-4})
    work = replace(work, server=replace(work.server, optimizer=OptimizerConfig("adam", 1e-6)))
    simulation = Simulation(work)
    state = replace(simulation.initial_state(), round=40)
    row = {"round": 40, "loss": 1.0, "validation_accuracy": 50.0}
    for before, warned in (([], True), ([row | {"round": 10}], False)):
        watch = TrainingWatch(before)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(3):
                watch.add(simulation, state, row)
        assert any("client.clip" in str(w.message) for w in found) == warned


@pytest.mark.parametrize("method", [FEDAVG, FLOWDUP], ids=lambda method: str(method["name"]))
@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_watching_changes_no_bit(tmp_path: Path, method: dict[str, Any], engine: str) -> None:
    """A simulation alone has no watch; the run that ends with the same psi was watched."""
    write_clients(tmp_path / "clients", only_zeros)
    work = config(tmp_path / "clients", method, engine={"name": engine, "device": "cpu"})
    assert told(work, tmp_path / "run")
    simulation = Simulation(work)
    *_, (state, _) = simulation.rounds(simulation.initial_state())
    stored = load(tmp_path / "run" / "checkpoint").psi
    assert all(torch.equal(stored[name], psi) for name, psi in state.psi.items())


SUFFERING = ("--set=server.rounds=20", "--set=run.evaluate_every=20", "--set=model='mlp'")


@pytest.fixture(scope="module")
def suffering(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("suffering")
    write_clients(folder / "clients", only_zeros)
    own = folder / "own.toml"
    own.write_text('method = { name = "fedavg" }\n')
    data = (f"--set=data.path='{folder}/clients'", "--set=data.source='folder'")
    more = ("--set=data.classes=2", "--set=server.cohort=5", "--set=client.optimizer.lr=0.1")
    return ["train", str(own), *SUFFERING, *data, *more]


def test_the_command_line_prints_one_line_and_json_stays_json(
    suffering: list[str], tmp_path: Path
) -> None:
    plain = flowdup(*suffering, "--out", tmp_path / "a")
    assert plain.error.startswith("warning: round 20: 100% of all predictions")
    assert plain.error.count("\n") == 1 and "TrainingWarning" not in plain.error
    machine = flowdup(*suffering, "--out", tmp_path / "b", "--json")
    assert [json.loads(line)["round"] for line in machine.out.splitlines()] == [*range(1, 21)]
    assert machine.error == plain.error


def test_on_a_terminal_the_bar_stays_below_the_warning(
    suffering: list[str], tmp_path: Path
) -> None:
    seen = flowdup_on_terminal(*suffering, "--out", tmp_path / "run").error
    assert seen.count("warning:") == 1
    place = seen.index("warning:")
    assert "20/20" in seen[place:]  # the bar is drawn again, with the round that was warned of
    assert seen[:place].endswith("\r\x1b[2K\x1b[1;33m")  # in the place of the bar, which is erased
    line = seen[place:].split("\n")[0]
    assert "rounds/s" not in line and line.rstrip().endswith("'em'")


def test_one_can_ignore_them_as_any_warning(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", only_zeros)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", TrainingWarning)
        list(train_run(config(tmp_path / "clients"), tmp_path / "run"))
    assert (tmp_path / "run" / "report.html").exists()
