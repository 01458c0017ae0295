"""Certificates on image sets: `python benchmarks/certificate.py --device cuda`, with FLOWDUP_DATA
pointing to MNIST, CIFAR-10 and FEMNIST; writes results/certificate.json.

Of each case FLowDUP and FedAvg are trained at p = 0.5, with clients set aside, and certified by
every route.  Then Rotated MNIST again: at other p, and with other dimensions k of the subspace, for
the complexity of the bound against accuracy.  A run that is finished in --runs is not trained
again, and the result is written after every run.  `--small` is for a CPU: a small network, few
rounds, and no more than the cases.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowdup.config import load_config
from flowdup.errors import FlowdupError
from flowdup.files import write_atomic
from flowdup.run import RunFolder, certify_run, train_run

ROOT = Path(__file__).parents[1]
FRACTIONS = (0.1, 0.2, 0.8)
DIMENSIONS = (200, 500, 1000, 2000, 5000, 10_000)
SGD = ("server.optimizer.name=sgd", "server.optimizer.lr=1.0", "server.lr_decay_fraction=0.0")
FEDAVG = {  # as experiments/paper-*.toml have it
    "rotated-mnist": ("client.optimizer.lr=0.3", *SGD),
    "class-partitioned-cifar10": ("client.optimizer.lr=0.1", *SGD),
    "femnist": ("client.optimizer.lr=0.1", *SGD),
}
ASIDE = {
    "rotated-mnist": ("data.train_clients=450", "data.certify_clients=100"),
    "class-partitioned-cifar10": ("data.certify_clients=100",),
    "femnist": ("data.certify_clients=360",),
}
SMALL = (
    *("model=cnn-small", "server.rounds=120", "server.cohort=30", "run.evaluate_every=40"),
    *("client.optimizer.lr=0.1", "method.subspace.k=1000"),
)


@dataclass(frozen=True)
class Case:
    preset: str
    method: str = "flowdup"
    p: float = 0.5
    k: int | None = None
    settings: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        parts = (self.preset, self.method, f"p-{self.p}", f"k-{self.k}" if self.k else "")
        return "-".join(filter(None, parts))

    def texts(self) -> list[str]:
        own = [*ASIDE[self.preset], f"data.labeled_fraction={self.p}", *self.settings]
        if self.method == "fedavg":
            own = [text for text in own if not text.startswith("method.")]
            return [*own, "method.name=fedavg", *FEDAVG[self.preset]]
        return [*own, f"method.subspace.k={self.k}"] if self.k else own


def cases(presets: list[str], small: bool) -> Iterator[Case]:
    changes = SMALL if small else ()
    for preset in presets:
        for method in ("flowdup", "fedavg"):
            yield Case(preset, method, settings=changes)
    if small or "rotated-mnist" not in presets:
        return
    yield from (Case("rotated-mnist", p=p) for p in FRACTIONS)
    yield from (Case("rotated-mnist", k=k) for k in DIMENSIONS)


def result(case: Case, runs: Path, device: str, draws: int) -> dict[str, Any]:
    """Train what is left to train, and certify it."""
    folder = runs / case.name
    config = load_config(case.preset, [*case.texts(), f"engine.device={device}"])
    last: dict[str, Any] = {}
    for last in train_run(config, folder, resume=RunFolder(folder).started):
        if "validation_accuracy" in last:
            print(case.name, json.dumps(last), flush=True)
    found = certify_run(folder, draws=draws)
    for row in found["certificate"]:  # thousands of numbers that the figure does not need
        row["terms"].pop("curve", None)
    return {
        "case": case.name,
        "preset": case.preset,
        "p": case.p,
        "k": config.method.table().get("subspace", {}).get("k"),
        "settings": case.texts(),
        **{key: value for key, value in found.items() if key != "sets"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", choices=ASIDE, default=list(ASIDE))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "certificate")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "certificate.json")
    parser.add_argument("--draws", type=int, default=4000, help="of the sampled predictor")
    parser.add_argument("--small", action="store_true", help="for a CPU")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in cases(given.presets, given.small):
        try:
            rows.append(result(case, given.runs, given.device, given.draws))
        except FlowdupError as error:  # a set that is not there: the others are done all the same
            rows.append({"case": case.name, "failed": str(error)})
        print(json.dumps(rows[-1]), flush=True)
        write_atomic(given.out, json.dumps(rows, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
