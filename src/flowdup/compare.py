"""Several methods on the same clients, several seeds each: one table of accuracies.

A comparison is a configuration with a table `compare` on top:

    [compare]
    seeds = [0, 1, 2]
    [compare.variants.fedavg]         # what differs from the rest of the file
    method = {name = "fedavg"}

Every run is an ordinary run folder OUT/VARIANT/seed-N in a process of its own; finished ones are
kept and broken ones continued when the comparison is started again.
"""

import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from flowdup.config import Config, load_table, merge, override, read_config
from flowdup.errors import ConfigError
from flowdup.files import write_atomic
from flowdup.run import evaluate_run, train_run

READINGS = ("transductive", "held_out")


@dataclass(frozen=True)
class Job:
    variant: str
    config: Config
    folder: Path


def read_comparison(name: str, out: Path, overrides: list[str] | None = None) -> list[Job]:
    table = dict(load_table(name))
    compare = table.pop("compare", None)
    unknown = set(compare or ()) - {"seeds", "variants"}
    if not compare or unknown or not compare.get("variants") or not compare.get("seeds"):
        raise ConfigError(
            f"'{name}' needs a table 'compare' with 'seeds' and 'variants', and no more"
        )
    for text in overrides or []:
        table = override(table, text)
    return [
        Job(
            variant,
            read_config(merge(table, change) | {"seed": seed}),
            out / variant / f"seed-{seed}",
        )
        for seed in compare["seeds"]
        for variant, change in compare["variants"].items()
    ]


def run_comparison(jobs: list[Job], workers: int) -> Iterator[Job]:
    """Run all jobs and yield each as it is done."""
    threads = max(1, torch.get_num_threads() // workers)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        try:
            futures = {pool.submit(_run, job, threads): job for job in jobs}
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def summarize(jobs: list[Job], out: Path) -> dict[str, dict[str, Any]]:
    """Accuracy on test clients per variant, in percent; also written to OUT/summary.json.

    `mean`, `std` (of a sample) and `seeds` are the transductive reading, `held_out` has the other.
    """
    summary: dict[str, dict[str, Any]] = {}
    for variant in dict.fromkeys(job.variant for job in jobs):
        folders = [job.folder for job in jobs if job.variant == variant]
        results = [json.loads((f / "evaluation.json").read_text())["accuracy"] for f in folders]
        first, second = (_spread([r[reading] for r in results]) for reading in READINGS)
        summary[variant] = first | {"held_out": second}
    write_atomic(out / "summary.json", json.dumps(summary, indent=2).encode())
    return summary


def _run(job: Job, threads: int) -> None:
    torch.set_num_threads(threads)
    for _ in train_run(job.config, job.folder, resume=True):
        pass
    evaluate_run(job.folder)


def _spread(values: list[float]) -> dict[str, Any]:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": spread, "seeds": values}
