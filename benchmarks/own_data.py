"""The first hour with data of one's own: what `flowdup init` and defaults give, against FedAvg.

    python benchmarks/own_data.py prepare FOLDER [WORK ...]   clients, and what init makes of them
    python benchmarks/own_data.py train FOLDER [WORK ...]     both methods, three seeds each

Clients are files, half of the training clients without labels.  FedAvg has its own defaults, and in
a second row what FLowDUP+ has: as many rounds, its optimisers, an averaged psi, calibrated EM.
`prepare` can be left out where a folder of settings was carried from another machine.
"""

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from flowdup.config import load_table, merge, read_config
from flowdup.data.sources import data_folder
from flowdup.provenance import provenance
from flowdup.run import evaluate_run, train_run

RESULTS = Path(__file__).parent / "results" / "own-data.json"
SEEDS = (0, 1, 2)
GROUPS = {"train": 240, "validation": 40, "test": 80}

Array = NDArray[Any]
Draw = np.random.Generator


@dataclass(frozen=True)
class Work:
    """`client` draws inputs and labels of one in a group."""

    about: str
    classes_per_client: int
    client: Callable[[Draw, str], tuple[Array, Array]]


def cifar10(draw: Draw, group: str) -> tuple[Array, Array]:
    """Two classes; pixels as they are, inverted, with colours exchanged, dark, or noisy."""
    x, y = _two_classes(draw, *_cifar10(group == "test"), points=100)
    kind = draw.integers(5)
    if kind == 1:
        x = 255 - x
    elif kind == 2:
        x = x[:, [2, 0, 1]]
    elif kind == 3:
        x = x // 4
    elif kind == 4:
        x = np.clip(x + draw.normal(0, 50, x.shape), 0, 255).astype(np.uint8)
    return x, y


def digits(draw: Draw, group: str) -> tuple[Array, Array]:
    """Two classes; pixels as they are, inverted, or turned upside down."""
    found = load_digits()
    part = slice(1200, None) if group == "test" else slice(1200)
    images = (found.images[part] * 15).astype(np.uint8)[:, None]
    x, y = _two_classes(draw, images, found.target[part], points=40)
    kind = draw.integers(3)
    return (x, 255 - x, x[:, :, ::-1].copy())[kind], y


def table(draw: Draw, group: str) -> tuple[Array, Array]:
    """Twelve columns, five classes; clients of three kinds, each with offsets of its own."""
    centers = np.random.default_rng(7).normal(0, 1, (5, 12))
    y = draw.integers(0, 5, 60)
    x = centers[y] + draw.normal(0, 0.9, (60, 12))
    offsets = np.random.default_rng(8).normal(0, 1.5, (3, 12))
    kind = draw.integers(3)
    signs = np.where(np.arange(12) % 3 == kind, -1, 1)
    return (signs * x + offsets[kind] + draw.normal(0, 0.3, 12)).astype(np.float32), y


def sensors(draw: Draw, group: str) -> tuple[Array, Array]:
    """Three axes of 64 steps: four movements, worn in one of four ways, each with a gain."""
    time = np.linspace(0, 4 * np.pi, 64)
    y, phases = draw.integers(0, 4, 60), draw.uniform(0, 6, 60)
    sine, double = (np.sin(f * (time + phases[:, None])) for f in (1, 2))
    axes = np.stack([sine, np.sign(sine), sine**3, double])[y, np.arange(60)]
    x = np.stack([axes, np.gradient(axes, axis=1) * 3, np.full_like(axes, 1.0)], 1)
    worn = ([0, 1, 2], [1, 0, 2], [2, 1, 0], [0, 2, 1])[draw.integers(4)]
    x = draw.uniform(0.5, 2) * x[:, worn] + draw.normal(0, 0.5, x.shape)
    return x.astype(np.float32), y


WORKS = {
    "cifar10": Work("CIFAR-10, two classes a client, five kinds of pixels", 2, cifar10),
    "digits": Work("digits of 8 x 8 pixels, two classes a client, turned or inverted", 2, digits),
    "table": Work("a table of 12 columns, three kinds of clients", 5, table),
    "sensors": Work("64 steps of three axes, worn in four ways", 4, sensors),
}


def main() -> None:
    parser = ArgumentParser(description="`flowdup init` and defaults on data of one's own.")
    parser.add_argument("step", choices=["prepare", "train"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("works", nargs="*", default=[*WORKS], metavar="WORK")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    for work in chosen.works:
        write_clients(WORKS[work], chosen.folder / work)
        settings = chosen.folder / f"{work}.toml"
        if chosen.step == "prepare":
            flowdup = [sys.executable, "-m", "flowdup", "init"]
            subprocess.run([*flowdup, chosen.folder / work, "--out", settings], check=True)
        else:
            cells = [train(work, settings, seed, chosen.device) for seed in chosen.seeds]
            save(chosen.out, [row for rows in cells for row in rows])


def write_clients(work: Work, folder: Path) -> None:
    """One file per client; of the training clients every other has labels."""
    for group, count in GROUPS.items():
        (folder / group).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            x, y = work.client(np.random.default_rng([number, len(group)]), group)
            labels = np.full_like(y, -1) if group == "train" and number % 2 else y
            np.savez(folder / group / f"{group}-{number}.npz", x=x, y=labels)


def train(work: str, settings: Path, seed: int, device: str) -> list[dict[str, Any]]:
    rows = []
    for method, table in methods(load_table(str(settings))).items():
        config = read_config(merge(table, {"seed": seed, "engine": {"device": device}}))
        out = settings.parent / "runs" / f"{work}-{method}-{seed}".replace(" ", "-")
        for _ in train_run(config, out):
            pass
        metrics = evaluate_run(out)["metrics"]
        row = {"work": work, "method": method, "seed": seed}
        row["guessing"] = round(100 / WORKS[work].classes_per_client, 1)
        row |= {reading: round(m["accuracy"]["mean"], 2) for reading, m in metrics.items()}
        print(json.dumps(row), flush=True)
        rows.append(row | provenance(config.engine.torch_device()))
    return rows


def methods(plus: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What init wrote, and FedAvg with as many rounds: by its defaults, and at full strength."""
    (first,) = plus["before"]
    rounds = plus["server"]["rounds"] + first["server"]["rounds"]
    data = {k: plus[k] for k in ("model", "data", "run")}
    sizes = {
        "client": {"batch_size": plus["client"]["batch_size"]},
        "server": {"cohort": plus["server"]["cohort"], "rounds": rounds},
    }
    parts = ("client", "server")
    strong = merge({k: plus[k] for k in parts}, {k: first[k] for k in parts})
    strong = merge(strong, {"server": {"rounds": rounds, "lr_decay_fraction": 0.7}})
    calibrated = {"method": {"name": "fedavg", "correction": "em", "init_scale": 0.41}}
    return {
        "FLowDUP+": plus,
        "FedAvg": {**data, **sizes, "method": {"name": "fedavg"}},
        "FedAvg + calibrated EM": {**data, **strong, **calibrated},
    }


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Beside what stands there of other works and seeds."""
    new = {(row["work"], row["method"], row["seed"]) for row in rows}
    old = json.loads(path.read_text()) if path.exists() else []
    kept = [row for row in old if (row["work"], row["method"], row["seed"]) not in new]
    path.write_text(json.dumps(kept + rows, indent=2) + "\n")


def _two_classes(draw: Draw, images: Array, labels: Array, points: int) -> tuple[Array, Array]:
    pair = draw.permutation(10)[:2]
    chosen = draw.permutation(np.flatnonzero(np.isin(labels, pair)))[:points]
    return images[chosen], labels[chosen].astype(np.int64)


@cache
def _cifar10(test: bool) -> tuple[Array, Array]:
    name = "test" if test else "train"
    with np.load(data_folder() / "cifar10.npz") as file:
        return file[f"x_{name}"].transpose(0, 3, 1, 2), file[f"y_{name}"]


if __name__ == "__main__":
    main()
