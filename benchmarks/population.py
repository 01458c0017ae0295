"""Memory and time of a round against how many clients there are and how many are sampled:
`python benchmarks/population.py`, with FLOWDUP_DATA pointing to MNIST.

FLowDUP with small networks, 100 images per client, one thread.  Lazy clients (`data.lazy`) are made
when a cohort asks for them, stored ones at the start.  Each point is a process of its own; its
memory is that at its highest, with Python, torch and the images.
"""

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from chart import INK, OURS, THEIRS
from matplotlib.figure import Figure

from flowdup.config import Config, read_config
from flowdup.files import write_atomic
from flowdup.provenance import provenance
from flowdup.run import Simulation

ROOT = Path(__file__).parents[1]
BUSY = 0.5  # mean number of running processes
LINES = {  # clients, engine: color
    ("lazy", "batched"): OURS,
    ("lazy", "sequential"): "#E69F00",
    ("stored", "batched"): THEIRS,
}


@dataclass(frozen=True)
class Case:
    population: int
    cohort: int
    clients: str = "lazy"  # or stored
    engine: str = "batched"
    source: str = "mnist"
    points: int = 100
    rounds: int = 3  # after one to warm up

    def config(self) -> Config:
        data = {
            "source": self.source,
            "points": self.points,
            "classes_per_client": 2,
            "rotations": [0, 90, 180, 270],
            "overlap": True,
            "lazy": self.clients == "lazy",
            "train_clients": self.population,
            "validation_clients": 0,
            "test_clients": 1,
            "labeled_fraction": 0.1,
        }
        method = {
            "name": "flowdup",
            "subspace": {"k": 500},
            "hypernetwork": {"embedding": 50, "hidden": 50, "backbone": "mlp"},
        }
        return read_config(
            {
                "model": "mlp",
                "data": data,
                "method": method,
                "server": {"rounds": self.rounds + 1, "cohort": self.cohort, "replacement": False},
                "engine": {"name": self.engine, "device": "cpu", "clients_at_once": 50},
            }
        )


CASES = [
    *(Case(10**n, 100) for n in (3, 4, 5, 6)),
    *(Case(10**6, cohort) for cohort in (10, 1000)),
    *(Case(10**n, 100, engine="sequential") for n in (3, 4, 5, 6)),
    *(Case(10**6, cohort, engine="sequential") for cohort in (10, 1000)),
    *(Case(population, 100, "stored") for population in (1_000, 3_000, 10_000)),
]
TINY = [Case(10**n, 20, source="digits", points=20, rounds=1) for n in (3, 6)]


def measure(case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    start = time.monotonic()
    simulation = Simulation(case.config())
    ready, before = time.monotonic(), peak_mb()
    rounds = simulation.rounds(simulation.initial_state())
    ends = [(time.monotonic(), time.process_time()) for _ in rounds]
    times, busy = ([b - a for a, b in pairwise(clock)] for clock in zip(*ends, strict=True))
    return asdict(case) | {
        "setup_seconds": round(ready - start, 3),
        "seconds_per_round": round(statistics.median(times), 4),
        "fastest_and_slowest": [round(min(times), 4), round(max(times), 4)],
        "cpu_seconds_per_round": round(statistics.median(busy), 4),  # if others are at work too
        "peak_mb": round(peak_mb(), 1),
        "peak_mb_before_rounds": round(before, 1),
        "threads": 1,
        **provenance(simulation.device),
    }


def peak_mb() -> float:
    """Resident memory at its highest, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def apart(case: Case) -> dict[str, Any]:
    """`measure` in a new process."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    print(
        f"{row['population']:>9,} {row['clients']}, cohort {row['cohort']:>4}, {row['engine']}: "
        f"{row['seconds_per_round']:.3g} s per round, {row['peak_mb']:.0f} MB"
    )
    return row


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Memory above, time below; against the population on the left, the cohort on the right."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    most = max(row["population"] for row in rows)
    middle = statistics.median_low(row["cohort"] for row in rows)
    views = {"population": ("cohort", middle), "cohort": ("population", most)}
    for column, (key, (other, fixed)) in zip(axes.T, views.items(), strict=True):
        for (clients, engine), color in LINES.items():
            line = sorted(
                (row[key], row["peak_mb"], row["seconds_per_round"])
                for row in rows
                if (row["clients"], row["engine"], row[other]) == (clients, engine, fixed)
            )
            for axis, values in zip(column, list(zip(*line, strict=True))[1:], strict=False):
                x = [point[0] for point in line]
                axis.plot(x, values, "o-", color=color, ms=4, label=f"{clients}, {engine}")
        column[0].set_title(f"{other} {fixed:,}", loc="left", fontsize=10, color=INK)
        column[0].set_xscale("log")
        column[1].set_xlabel(f"clients in the {key}", color=INK)
    axes[0, 0].set_ylabel("peak memory, MB", color=INK)
    axes[0, 0].set_ylim(bottom=0)
    axes[1, 0].set_ylabel("seconds per round", color=INK)
    axes[1, 0].set_yscale("log")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK)
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    figure.legend(
        lines.values(), lines.keys(), loc="outside upper left", ncols=3, frameon=False, fontsize=9
    )
    device, versions = rows[0]["device"], rows[0]["versions"]
    figure.supxlabel(f"{device}, one thread, torch {versions['torch']}", fontsize=8, color=INK)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    write_atomic(path, out.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time against the population.")
    parser.add_argument("--tiny", action="store_true", help="see that it runs, measure little")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/population.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/population.png")
    parser.add_argument("--case", help="measure this one here and print it")
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(measure(Case(**json.loads(chosen.case)))))
        return
    if os.getloadavg()[0] > BUSY and not chosen.tiny:
        print("The machine is busy with something else: its times will not be worth much.")
    rows = [apart(case) for case in (TINY if chosen.tiny else CASES)]
    write_atomic(chosen.out, (json.dumps(rows, indent=2) + "\n").encode())
    draw(rows, chosen.plot)


if __name__ == "__main__":
    main()
