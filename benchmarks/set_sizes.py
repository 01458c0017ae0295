"""How much data does a client need?  `python benchmarks/set_sizes.py`, with FLOWDUP_DATA pointing
to the image sets; writes results/set-sizes.json and draws docs/set-sizes.png.

FLowDUP with small networks and few rounds (`small_runs.py`), one seed.  Models of unseen clients
are made from 1 to 500 unlabeled points and scored on others, the same for every number of points,
as `flowdup evaluate --set-sizes` does it.  Simulated clients are given as many points as that
takes, and may share images.  `--runs` keeps what was trained, and a set that `--presets` does not
name keeps its row.  CIFAR-10 and FEMNIST take `--full`, for a GPU: models of CIFAR-10's clients
hardly depend on their data after so few rounds with a small network, and FEMNIST is too slow.
"""

import argparse
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chart import INK
from matplotlib.figure import Figure
from small_runs import RUNS, SmallRun

from flowdup.errors import FlowdupError
from flowdup.files import write_atomic
from flowdup.run import RunFolder, evaluate_run

ROOT = Path(__file__).parents[1]
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500)
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")


@dataclass(frozen=True)
class Curve:
    run: SmallRun
    largest: int  # number of points that models are made from
    clients: int = 40

    @property
    def sizes(self) -> list[int]:
        return [size for size in SIZES if size < self.largest] + [self.largest]

    @property
    def settings(self) -> list[str]:
        """Of the clients that are scored; those of FEMNIST are as they are."""
        if self.run.preset == "femnist":
            return []
        counts = [f"data.test_clients={self.clients}", "data.train_clients=1"]
        counts += ["data.validation_clients=0"]
        return [f"data.points={2 * self.largest}", "data.overlap=true", *counts]


CURVES = (
    Curve(RUNS["digits"], 30, 100),
    Curve(RUNS["rotated-mnist"], 500),
    Curve(RUNS["rotated-fashion-mnist"], 500),
    Curve(RUNS["class-partitioned-cifar10"], 500),
    Curve(RUNS["femnist"], 100),
)


def row(curve: Curve, runs: Path, full: bool) -> dict[str, Any]:
    folder = curve.run.train(runs, full=full)
    config = RunFolder(folder).read_config()
    found = evaluate_run(folder, None, curve.sizes, settings=curve.settings)
    return {
        "data": curve.run.data,
        "model": config.model,
        "rounds": found["round"],
        "points_in_training": config.data.points if curve.settings else None,
        "clients": found["support"][0]["clients"],
        "curve": [{"points": r["points"], **r["metrics"]["accuracy"]} for r in found["support"]],
        **{key: found[key] for key in ("method", "settings", "device", "versions", "commit")},
    }


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    for line, color in zip(rows, COLORS, strict=False):
        points = [at["points"] for at in line["curve"]]
        axis.plot(points, [at["mean"] for at in line["curve"]], "o-", ms=4, color=color)
        last = line["curve"][-1]
        axis.annotate(
            f" {line['data']}", (last["points"], last["mean"]), color=color, va="center", fontsize=9
        )
    axis.set_xscale("log")
    axis.set_xticks(SIZES, [str(size) for size in SIZES])
    axis.minorticks_off()
    axis.set_xlim(0.9, 2500)
    axis.set_xlabel("unlabeled points that a client's model is made from", color=INK)
    axis.set_ylabel("accuracy on its other points, %", color=INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    write_atomic(path, out.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [curve.run.preset for curve in CURVES]
    parser.add_argument("--presets", nargs="+", choices=names, default=names)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "small")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/set-sizes.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/set-sizes.png")
    parser.add_argument("--full", action="store_true", help="presets as they are, for a GPU")
    given = parser.parse_args()
    old = json.loads(given.out.read_bytes()) if given.out.exists() else []
    rows = {line["data"]: line for line in old}
    for curve in CURVES:
        small = curve.run.settings is not None
        if curve.run.preset not in given.presets or not (given.full or small):
            continue
        try:
            rows[curve.run.data] = row(curve, given.runs, given.full)
        except FlowdupError as error:  # a set that is not there: the others are done all the same
            print(f"{curve.run.data}: {error}", flush=True)
            continue
        print(json.dumps(rows[curve.run.data]), flush=True)
        there = [rows[c.run.data] for c in CURVES if c.run.data in rows]
        write_atomic(given.out, json.dumps(there, indent=1).encode() + b"\n")
        draw(there, given.plot)


if __name__ == "__main__":
    main()
