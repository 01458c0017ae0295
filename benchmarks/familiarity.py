"""How often foreign clients are told from those like training: `python benchmarks/familiarity.py`,
with FLOWDUP_DATA pointing to MNIST and Fashion-MNIST; writes results/familiarity.json.

FLowDUP with a small network on rotated MNIST, three seeds, limits at 5 % false alarms.  Unseen
clients have MNIST's test images; foreign ones noise, these images inverted, or Fashion-MNIST's,
turned as MNIST's are.  `--runs` keeps what was trained.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from small_runs import RUNS
from torch import Tensor

import flowdup
from flowdup.config import Config
from flowdup.data import DataConfig, load_population
from flowdup.files import write_atomic
from flowdup.personalize import Federation
from flowdup.provenance import provenance
from flowdup.random import Stream
from flowdup.run import RunFolder

ROOT = Path(__file__).parents[1]
RUN = RUNS["rotated-mnist"]
POINTS = (1, 3, 10, 30, 100)  # that a client has
UNSEEN = "unseen clients"


def inputs(data: DataConfig, stream: Stream, draw: torch.Generator) -> list[Tensor]:
    """Of test clients, their points in random order."""
    few = replace(data, train_clients=1, validation_clients=0)
    clients = load_population(few, stream).test
    return [c.x[torch.randperm(len(c), generator=draw)] for c in clients]


def kinds_of_clients(config: Config, seed: int) -> dict[str, list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    stream = Stream(config.seed).child("data")
    own = inputs(config.data, stream, draw)
    noise = [torch.randint(0, 256, x.shape, generator=draw).to(torch.uint8) for x in own]
    fashion = inputs(replace(config.data, source="fashion-mnist"), stream, draw)
    inverted = [255 - x for x in own]
    return {UNSEEN: own, "Fashion-MNIST": fashion, "noise": noise, "inverted images": inverted}


def called_foreign(federation: Federation, clients: Sequence[Tensor], points: int) -> int:
    return sum(federation.familiarity(x[:points]).foreign for x in clients)


def rows(folder: Path, seed: int) -> list[dict[str, Any]]:
    federation, config = flowdup.load(folder), RunFolder(folder).read_config()
    assert federation.summary is not None
    return [
        {
            "clients": name,
            "points": points,
            "count": len(clients),
            "foreign": called_foreign(federation, clients, points),
            "seed": seed,
            "rate": federation.summary.rate,
            "model": config.model,
            "rounds": federation.round,
            "train_clients": config.data.train_clients,
            "validation_clients": config.data.validation_clients,
            **provenance(torch.device("cpu")),
        }
        for name, clients in kinds_of_clients(config, seed).items()
        for points in POINTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "small")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/familiarity.json")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for seed in given.seeds:
        found += rows(RUN.train(given.runs, seed), seed)
        for row in found[-4 * len(POINTS) :]:
            print(seed, row["clients"], row["points"], f"{row['foreign']} of {row['count']}")
        write_atomic(given.out, json.dumps(found, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
