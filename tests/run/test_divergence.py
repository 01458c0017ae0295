"""A training that diverges leaves files that every reader of JSON can read."""

import contextlib
import json
from pathlib import Path

from small import population

from flowdup import read_config, train_run
from flowdup.errors import TrainingError


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_a_loss_that_is_not_finite_is_never_written_as_a_number(tmp_path: Path) -> None:
    table = {
        "model": "mlp",
        "method": {"name": "fedavg"},
        "client": {"clip": 0.0, "batch_size": 10, "optimizer": {"lr": 1e30}},
        "server": {"rounds": 4, "cohort": 3, "optimizer": {"name": "sgd", "lr": 1e8}},
        "engine": {"device": "cpu"},
    }
    yielded = []
    with contextlib.suppress(TrainingError):  # diverged, sooner or later
        for metrics in train_run(read_config(table), tmp_path, population=population()):
            yielded.append(metrics)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert len(rows) < 4 or None in [row["loss"] for row in rows]  # it did diverge
    assert yielded == rows[: len(yielded)]
