"""Runs of several stages for tests: small enough to train one in a tenth of a second."""

from pathlib import Path
from typing import Any

from small import METHODS, population

from flowdup import Config, read_config, train_run

FIRST = {"method": {"name": "fedavg", "correction": "em"}, "server": {"rounds": 3}}
SECOND = {"method": METHODS["ld-fedavg"], "server": {"rounds": 3, "averaging": 0.5}}
TABLE: dict[str, Any] = {
    "model": "mlp",
    "method": METHODS["flowdup-corrected"],
    "client": {"batch_size": 10},
    "server": {"rounds": 4, "cohort": 3, "averaging": 0.9},
    "engine": {"name": "batched", "device": "cpu"},
    "run": {"checkpoint_every": 2, "evaluate_every": 2},
    "before": [FIRST, SECOND],
}


def staged(**changes: Any) -> Config:
    """FedAvg, LD-FedAvg and FLowDUP, with corrections and averages: 3, 3 and 4 rounds."""
    return read_config(TABLE | changes)


def train(config: Config, out: Path, resume: bool = False) -> list[dict[str, Any]]:
    return list(train_run(config, out, resume, population()))
