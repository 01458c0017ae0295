"""The round to keep: the best on validation clients or the last, and when to stop."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import change_tensors
from small import SPEC, population
from staged import shaky, train

from flowdup import Population, evaluate_run, load, train_run
from flowdup.checkpoint import load_checkpoint
from flowdup.errors import CheckpointError
from flowdup.evaluation import transductive_accuracy
from flowdup.methods import Params
from flowdup.run import RunFolder, Simulation
from flowdup.run.round_metrics import best_of as best_of_validated
from flowdup.run.round_metrics import validated
from flowdup.server import BestRound


def best_of(rows: list[dict[str, Any]]) -> int:
    """The first round with the highest accuracy on validation clients."""
    return int(max(rows, key=lambda row: (row["validation_accuracy"], -row["round"]))["round"])


def same(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], t) for n, t in b.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run whose best round is not its last."""
    out = tmp_path_factory.mktemp("best")
    rows = train(shaky(), out)
    assert best_of(rows) < rows[-1]["round"]
    return out, rows


@pytest.fixture
def run(whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> RunFolder:
    shutil.copytree(whole[0], tmp_path / "run")
    return RunFolder(tmp_path / "run")


def test_the_earlier_of_two_equally_good_rounds_is_the_best() -> None:
    best = BestRound(4, 50.0).after(6, 50.0).after(8, 40.0)
    assert (best.round, best.misses) == (4, 2)
    assert best.after(10, 50.5) == BestRound(10, 50.5, 0)


def test_of_two_equally_good_rounds_that_with_the_lower_loss_is_the_best() -> None:
    """Where validation clients are few, rounds that have hardly learned may have all right."""
    best = BestRound(4, 100.0, 0, 0.5).after(6, 100.0, 0.1).after(8, 100.0, 0.2)
    assert best == BestRound(6, 100.0, 2, 0.1)  # no better one to be patient for
    assert best.after(10, 99.0, 0.01).round == 6
    unknown = BestRound(4, 50.0).after(6, 50.0)
    assert unknown.round == 4


def test_a_run_whose_accuracy_stays_keeps_the_round_with_the_lowest_loss(tmp_path: Path) -> None:
    slow = {"batch_size": 10, "optimizer": {"lr": 1e-6}}
    rows = train(shaky(client=slow), tmp_path)
    assert len({row["validation_accuracy"] for row in rows}) == 1
    losses = {row["round"]: row["validation_loss"] for row in rows}
    best = min(losses, key=lambda round: losses[round])
    assert best > 1 and load(tmp_path).round == best
    assert best_of_validated(validated(rows, 0)).round == best


def test_the_best_round_is_what_models_are_made_of_and_scored(
    whole: tuple[Path, list[dict[str, Any]]],
) -> None:
    out, rows = whole
    best = best_of(rows)
    assert load(out).round == best == evaluate_run(out, population())["round"]
    simulation, state = Simulation.resume(shaky(), out / "best", population())
    told = transductive_accuracy(simulation.engine, state.deployed, population().validation)
    assert told.mean == rows[best - 1]["validation_accuracy"]
    assert same(load(out).psi, state.psi)


def test_the_average_of_psi_is_what_is_evaluated_and_made_models_of(tmp_path: Path) -> None:
    """psi itself may be anything."""
    server = {"rounds": 3, "cohort": 3, "averaging": 0.9}
    train(shaky(server=server, run={"keep": "last"}), tmp_path)
    average = load_checkpoint(tmp_path / "checkpoint")[1].average
    assert same(load(tmp_path).psi, average)
    found = evaluate_run(tmp_path, population())["metrics"]

    def forget(tensors: Params) -> None:
        for name, tensor in tensors.items():
            if name.startswith("psi/"):
                tensor.zero_()

    change_tensors(tmp_path / "checkpoint", forget)
    assert same(load(tmp_path).psi, average)
    assert evaluate_run(tmp_path, population())["metrics"] == found


def test_the_last_round_is_saved_whether_it_is_the_best_or_not(
    whole: tuple[Path, list[dict[str, Any]]],
) -> None:
    """It is where a longer run goes on."""
    assert load_checkpoint(whole[0] / "checkpoint")[1].round == 6


def test_the_last_round_counts_where_that_is_asked_for(tmp_path: Path) -> None:
    train(shaky(run={"evaluate_every": 1, "keep": "last"}), tmp_path)
    assert load(tmp_path).round == 6 and not (tmp_path / "best").exists()


def test_going_on_with_the_last_round_removes_the_best(run: RunFolder) -> None:
    train(shaky(7, run={"evaluate_every": 1, "keep": "last"}), run.path, resume=True)
    assert not run.best.exists() and load(run.path).round == 7


def test_a_best_round_that_nobody_kept_is_not_made_up(run: RunFolder) -> None:
    train(shaky(run={"evaluate_every": 1, "keep": "last"}), run.path, resume=True)
    with pytest.raises(CheckpointError, match=r"does not hold round 1, .* run.keep = 'last'"):
        train(shaky(7), run.path, resume=True)


def test_another_round_in_place_of_the_best_is_refused(run: RunFolder) -> None:
    shutil.rmtree(run.best)
    shutil.copytree(run.checkpoint, run.best)
    with pytest.raises(CheckpointError, match="does not hold round 1, the best so far: restore"):
        train(shaky(7), run.path, resume=True)


def test_a_damaged_best_round_is_refused(run: RunFolder) -> None:
    (path,) = run.best.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-5])
    for work in (lambda: train(shaky(7), run.path, resume=True), lambda: load(run.path)):
        with pytest.raises(CheckpointError, match="restore the folder"):
            work()


def test_a_folder_that_only_has_its_best_round_left_is_not_started_over(run: RunFolder) -> None:
    for path in (run.config, run.clients, run.metrics):
        path.unlink()
    shutil.rmtree(run.checkpoint)
    with pytest.raises(CheckpointError, match="has best but no whole checkpoint"):
        train(shaky(), run.path)


def test_a_run_ends_when_it_got_no_better_for_long_enough_and_stays_ended(tmp_path: Path) -> None:
    patient = shaky(run={"evaluate_every": 1, "patience": 2})
    rows = train(patient, tmp_path)
    assert len(rows) == best_of(rows) + 2 < 6
    assert train(patient, tmp_path, resume=True) == []
    assert RunFolder(tmp_path).read_metrics()[-1]["round"] == len(rows)
    more = train(shaky(run={"evaluate_every": 1}), tmp_path, resume=True)  # unless told otherwise
    assert [row["round"] for row in more] == list(range(len(rows) + 1, 7))


def test_patience_begins_when_the_rate_has_risen(tmp_path: Path) -> None:
    server = {"rounds": 16, "cohort": 3, "warm_up": 8, "optimizer": {"name": "sgd", "lr": 1.0}}
    rows = train(shaky(server=server, run={"evaluate_every": 1, "patience": 1}), tmp_path)
    first, second, *_ = (row["validation_accuracy"] for row in rows)
    assert second < first and len(rows) == 9
    late = shaky(server=server | {"warm_up": 2}, before=[{"server": {"rounds": 4, "warm_up": 0}}])
    late = replace(late, run=replace(late.run, patience=1))
    stages = [row["stage"] for row in train(late, tmp_path / "late")]
    assert (
        stages.count(0) < 4 and stages.count(1) >= 3
    )  # the second rises for two rounds of its own


def test_a_run_has_reached_its_best_round_before_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system is asked: a kill between the two leaves a run that knows what to save."""
    replace, seen = os.replace, list[tuple[str, int]]()

    def watched(source: Path, target: Path) -> None:
        if target.name == "checkpoint.json":
            seen.append((target.parent.name, json.loads(Path(source).read_text())["round"]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    train(shaky(2, run={"evaluate_every": 1, "checkpoint_every": 1}), tmp_path)
    assert seen == [("checkpoint", 0), ("checkpoint", 1), ("best", 1), ("checkpoint", 2)]


def test_without_validation_clients_the_last_round_counts(tmp_path: Path) -> None:
    ours = Population(SPEC, population().train, [], population().test)
    list(train_run(shaky(2), tmp_path, population=ours))
    assert load(tmp_path).round == 2 and not (tmp_path / "best").exists()
