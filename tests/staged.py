"""Runs of several stages for tests: small enough to train one in a tenth of a second."""

from pathlib import Path
from typing import Any

from small import METHODS, population

from flowdup import Config, read_config, train_run

FIRST = {"method": {"name": "fedavg", "correction": "em"}, "server": {"rounds": 3}}
SECOND = {"method": {"name": "fedavg"}, "server": {"rounds": 3, "averaging": 0.5}}
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
    """FedAvg twice and FLowDUP, with corrections and averages: 3, 3 and 4 rounds."""
    return read_config(TABLE | changes)


def train(config: Config, out: Path, resume: bool = False) -> list[dict[str, Any]]:
    return list(train_run(config, out, resume, population()))


def shaky(rounds: int = 6, **changes: Any) -> Config:
    """FedAvg at far too high a rate, evaluated in every round: the first is the best."""
    table = {
        "seed": 3,
        "model": "mlp",
        "method": {"name": "fedavg"},
        "client": {"batch_size": 10, "optimizer": {"lr": 2.0}},
        "server": {"rounds": rounds, "cohort": 3, "optimizer": {"name": "sgd", "lr": 1.0}},
        "engine": {"device": "cpu"},
        "run": {"evaluate_every": 1},
    }
    return read_config(table | changes)
