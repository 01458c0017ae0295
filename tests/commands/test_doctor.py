"""`flowdup doctor` names what a run suffers from, with the number that shows it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands.here import flowdup
from npz_clients import balanced, write_clients
from small import population

from flowdup.checkpoint import load_checkpoint, save_checkpoint
from flowdup.config import load_config
from flowdup.run import RunFolder, train_run


def train(out: Path, clients: Path, *settings: str, rounds: int = 40, clip: float = 1.0) -> Path:
    given = [
        *("model='mlp'", "engine.name='sequential'", "engine.device='cpu'", "data.source='folder'"),
        *(f"data.path='{clients}'", "data.classes=2", "run.evaluate_every=10", "server.cohort=5"),
        *(f"server.rounds={rounds}", "server.lr_decay_fraction=0.0", *settings),
        *("client.optimizer.lr=0.1", "server.optimizer.lr=0.02", f"client.clip={clip}"),
    ]
    own = out.with_suffix(".toml")
    own.write_text('method = { name = "flowdup", subspace = { k = 100 } }\n')
    list(train_run(load_config(str(own), given), out))
    return out


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    write_clients(folder / "clients", balanced)
    return train(folder / "run", folder / "clients")


def findings(run: Path) -> dict[str, dict[str, Any]]:
    ended = flowdup("doctor", run, "--json")
    assert ended.code == 0, ended.error
    return {found["name"]: found for found in json.loads(ended.out)["findings"]}


def changed(run: Path, folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> Path:
    """A copy of a run whose rounds went otherwise."""
    shutil.copytree(run, folder)
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    change(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_nothing_is_wrong_with_a_run_that_learns(healthy: Path) -> None:
    assert flowdup("doctor", healthy).out == "nothing known is wrong with this run\n"


def test_gradients_that_are_all_clipped_are_told(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", balanced)
    run = train(tmp_path / "run", tmp_path / "clients", rounds=2, clip=1e-4)
    found = findings(run)["clipped-gradients"]
    assert found["numbers"]["clip"] == 1e-4 < found["numbers"]["median_norm"]
    assert found["numbers"]["clients"] == 5


def test_over_fitting_is_a_loss_that_falls_on_while_validation_does_too(
    healthy: Path, tmp_path: Path
) -> None:
    def decline(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["loss"] = 1.0 if row["round"] <= 20 else 0.5
            if "validation_accuracy" in row:
                row["validation_accuracy"] = 90.0 - abs(row["round"] - 20)

    found = findings(changed(healthy, tmp_path / "run", decline))
    assert found.keys() == {"over-fitting"}
    assert found["over-fitting"]["numbers"] == {
        "best_round": 20,
        "best": 90.0,
        "last": 70.0,
        "loss_then": 1.0,
        "loss_now": 0.5,
    }

    def rise(rows: list[dict[str, Any]]) -> None:
        decline(rows)
        for row in rows:
            row["loss"] = 1.0

    assert not findings(changed(healthy, tmp_path / "other", rise))  # it only learns no more


def test_a_loss_that_is_not_finite_is_told(healthy: Path, tmp_path: Path) -> None:
    def diverge(rows: list[dict[str, Any]]) -> None:
        rows[7]["loss"] = None

    found = findings(changed(healthy, tmp_path / "run", diverge))
    assert found["loss-not-finite"]["numbers"] == {"rounds": 1, "first_round": 8}


def test_a_run_that_was_stopped_is_told_and_one_that_got_no_better_is_not(
    healthy: Path, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", healthy.parent / "clients", "run.patience=1", rounds=200)
    assert len((run / "metrics.jsonl").read_text().splitlines()) < 200
    assert "unfinished" not in findings(run)
    config = load_config(str(run / "config.toml"))
    list(islice(train_run(config, tmp_path / "stopped"), 5))
    found = findings(tmp_path / "stopped")["unfinished"]
    assert found["numbers"] == {"round": 5, "rounds": 200}


def test_clients_whose_embeddings_are_alike_are_told(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", balanced, move=0.0)
    found = findings(train(tmp_path / "run", tmp_path / "clients", rounds=3))
    assert found["stuck-embedding"]["numbers"]["spread"] < 1e-6


def test_one_class_for_everything_is_told(tmp_path: Path) -> None:
    def unequal(draw: np.random.Generator, group: str) -> Any:
        return np.arange(20) % 2 if group != "train" else np.zeros(20, np.int64)

    write_clients(tmp_path / "clients", unequal)
    fedavg = "method={name='fedavg'}"
    run = train(tmp_path / "run", tmp_path / "clients", fedavg, "run.keep='last'", rounds=20)
    found = findings(run)
    assert found["one-class-dominates"]["numbers"] == {"class": 0, "predicted": 1.0, "labels": 0.5}
    assert found["no-better-than-guessing"]["numbers"] == {"accuracy": 50.0, "guessing": 50.0}
    assert "the embedding: method 'fedavg' has none" in flowdup("doctor", run).out


def test_validation_clients_without_labels_are_told(tmp_path: Path) -> None:
    def hidden(draw: np.random.Generator, group: str) -> Any:
        return np.full(20, -1) if group == "validation" else balanced(draw, group)

    write_clients(tmp_path / "clients", hidden)
    found = findings(train(tmp_path / "run", tmp_path / "clients", rounds=2))
    assert found["no-validation"]["numbers"] == {"clients": 5, "labeled": 0}


def test_a_stage_before_that_was_as_good_is_told(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", balanced)
    before = "before=[{method={name='fedavg'},server={rounds=20}}]"
    run = train(tmp_path / "run", tmp_path / "clients", before, rounds=10)

    def equal(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if "validation_accuracy" in row:
                row["validation_accuracy"] = 80.0 + row["stage"]

    better = changed(run, tmp_path / "better", equal)
    assert "first-stage-as-good" not in findings(better)

    def worse(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if "validation_accuracy" in row:
                row["validation_accuracy"] = 80.0 - row["stage"]

    found = findings(changed(run, tmp_path / "worse", worse))["first-stage-as-good"]
    assert found["numbers"] == {"before": 80.0, "last": 79.0}
    assert "'fedavg', a stage before, reached 80.0%" in found["text"]


def test_a_model_to_start_from_that_was_as_good_is_told(healthy: Path, tmp_path: Path) -> None:
    clients = healthy.parent / "clients"
    run = train(tmp_path / "run", clients, f"start='{healthy}'", rounds=10)

    def began(accuracy: float) -> Callable[[list[dict[str, Any]]], None]:
        def change(rows: list[dict[str, Any]]) -> None:
            assert "start_accuracy" in rows[0]
            rows[0]["start_accuracy"] = accuracy
            rows[-1]["validation_accuracy"] = 80.0

        return change

    assert "start-as-good" not in findings(changed(run, tmp_path / "better", began(79.0)))
    found = findings(changed(run, tmp_path / "worse", began(81.0)))["start-as-good"]
    assert found["numbers"] == {"start": 81.0, "last": 80.0}
    assert f"start = '{healthy}' has 81.0%" in found["text"]


@pytest.mark.parametrize(
    ("strength", "left"), [(0.0, "models are the same"), (0.5, "differ by the prior of class")]
)
def test_a_correction_that_leaves_personal_models_out_is_told(
    healthy: Path, tmp_path: Path, strength: float, left: str
) -> None:
    assert not any("correction" in found["text"] for found in findings(healthy).values())
    method = "method={name='flowdup',correction='em',subspace={k=100}}"
    run = train(tmp_path / "run", healthy.parent / "clients", method)
    folder = RunFolder(run)
    spec, state = load_checkpoint(folder.kept)
    for move in (1.0, 0.5, 0.0):
        told = {"move": torch.tensor(move), "strength": torch.tensor(strength)}
        save_checkpoint(folder.kept, spec, replace(state, correction=state.correction | told))
        found = findings(run)
        assert ("no-personal-move" in found) == (move == 0)
    assert found["no-personal-move"]["numbers"] == {"move": 0.0, "strength": strength}
    assert "models of 'flowdup' were no better than everyone's" in flowdup("doctor", run).out
    assert left in found["no-personal-move"]["text"]


def test_a_run_from_memory_is_looked_at_without_its_clients(tmp_path: Path) -> None:
    config = load_config("digits", ["model='mlp'", "server.rounds=2", "server.cohort=4"])
    list(islice(train_run(config, tmp_path / "run", population=population()), 1))
    out = flowdup("doctor", tmp_path / "run").out
    assert "unfinished: the run has come to round 1 of 2" in out
    told = "gradients, embeddings and predictions: the clients were given in Python"
    assert f"not known: {told}" in out
