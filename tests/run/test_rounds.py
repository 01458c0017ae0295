"""What a run records of its rounds, and how it goes on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import METHODS, SPEC, client, population, ragged_clients

from flowdup import Config, Population, evaluate_run, read_config, train_run
from flowdup.errors import ConfigError
from flowdup.run import Simulation


def settings(rounds: int, server: dict[str, Any] | None = None, **changes: Any) -> Config:
    table = {
        "model": "mlp",
        "method": METHODS["flowdup"],
        "client": {"batch_size": 10},
        "server": {"rounds": rounds, "cohort": 3} | (server or {}),
        "engine": {"device": "cpu"},
    }
    return read_config(table | changes)


def train(config: Config, out: Path, resume: bool = False) -> list[dict[str, Any]]:
    return list(train_run(config, out, resume, population()))


def test_validation_clients_are_scored_as_often_as_told_and_after_the_last_round(
    tmp_path: Path,
) -> None:
    rows = train(settings(5, run={"evaluate_every": 2}), tmp_path)
    scored = [row["round"] for row in rows if "validation_accuracy" in row]
    assert scored == [2, 4, 5]


def test_a_continued_run_has_its_tensors_in_the_order_of_a_fresh_one(tmp_path: Path) -> None:
    """Sums over parameters depend on it, so the bits do: a file may hold them in another order."""
    config = settings(1)
    train(config, tmp_path)
    simulation = Simulation(config, population())
    loaded = simulation.load_state(tmp_path / "checkpoint")
    assert list(loaded.psi) == list(simulation.initial_state().psi) != sorted(loaded.psi)


def test_more_rounds_are_refused_where_the_rate_hangs_on_their_number(tmp_path: Path) -> None:
    falling = {"lr_decay_fraction": 0.5}
    train(settings(2, falling), tmp_path / "falling")
    with pytest.raises(ConfigError, match="rounds"):
        train(settings(4, falling), tmp_path / "falling", resume=True)
    train(settings(2), tmp_path / "constant")
    rows = train(settings(4), tmp_path / "constant", resume=True)
    assert [row["round"] for row in rows] == [3, 4]


def test_the_seconds_of_a_continued_run_go_on(tmp_path: Path) -> None:
    train(settings(1), tmp_path)
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row | {"seconds": 1000.0}) + "\n")
    (more,) = train(settings(2), tmp_path, resume=True)
    assert 1000.0 < more["seconds"] < 2000.0


def test_costs_are_those_of_a_client_of_middling_size(tmp_path: Path) -> None:
    """Of 1, 2, 7, 10, 13, 20, 24 and 33 points."""
    ours = Population(SPEC, ragged_clients(), [], [client(9, 40)])
    config = settings(1)
    list(train_run(config, tmp_path, population=ours))
    assert evaluate_run(tmp_path, ours)["cost"]["points"] == 12


def test_a_teacher_is_calibrated_from_the_first_evaluation_on() -> None:
    method = {"name": "fedavg-pseudo", "correction": "em", "teacher": {"warm_up": 0}}
    every_second = {"evaluate_every": 2}
    config = settings(3, {"averaging": 0.5}, method=method, run=every_second)
    simulation = Simulation(config, population())
    first, second, third = (s for s, _ in simulation.rounds(simulation.initial_state()))
    assert not first.correction
    for state, correction in ((first, {}), (third, second.correction)):
        model = simulation.method.global_model(replace(state, correction=correction).deployed)
        found = {n: state.method_state[f"teacher.{n}"] for n in model}
        assert all(torch.equal(found[n], w) for n, w in model.items())
    plain = simulation.method.global_model(third.average)
    assert any(not torch.equal(model[n], w) for n, w in plain.items())
