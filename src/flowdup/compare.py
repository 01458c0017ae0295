"""Several methods on the same clients, several seeds each: one table of accuracies.

A comparison is a configuration with a table `compare` on top:

    [compare]
    seeds = [0, 1, 2]
    [compare.variants.fedavg]         # what differs from the rest of the file
    method = {name = "fedavg"}
    [compare.variants.fedavg.grid]    # perhaps: lists of values, every combination a variant
    "client.optimizer.lr" = [0.1, 0.3]

Every run is an ordinary run folder OUT/VARIANT/seed-N in a process of its own; finished ones are
kept and broken ones continued when the comparison is started again.
"""

import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from flowdup.config import Config, load_table, merge, nest, override, read_config
from flowdup.errors import ConfigError
from flowdup.files import write_atomic
from flowdup.registry import import_modules
from flowdup.run import evaluate_run, train_run
from flowdup.settings import Table, as_table

READINGS = ("accuracy", "held_out", "validation")
COSTS = ("points", "parameters", "bytes_down", "bytes_up", "train_flops", "personalize_flops")


@dataclass(frozen=True)
class Job:
    variant: str
    config: Config
    folder: Path


def read_comparison(name: str, out: Path, overrides: list[str] | None = None) -> list[Job]:
    table = dict(load_table(name))
    compare = as_table(table.pop("compare", {}), "compare")
    seeds, variants = compare.get("seeds", []), as_table(compare.get("variants", {}), "variants")
    if set(compare) != {"seeds", "variants"} or not _seeds(seeds) or not variants:
        raise ConfigError(
            f"'{name}' needs a table 'compare' with 'seeds' (whole numbers) and 'variants'"
        )
    for text in overrides or []:
        table = override(table, text)
    changes = {n: t for name, change in variants.items() for n, t in _expand(name, change)}
    return [
        Job(
            variant,
            read_config(merge(table, change) | {"seed": seed}),
            out / variant / f"seed-{seed}",
        )
        for seed in seeds
        for variant, change in changes.items()
    ]


def choose(jobs: list[Job], only: str) -> list[Job]:
    """Those whose variant fits a pattern, with the values of its grid or without."""

    def fits(variant: str) -> bool:
        return fnmatchcase(variant, only) or fnmatchcase(variant.partition("/")[0], only)

    chosen = [job for job in jobs if fits(job.variant)]
    if not chosen:
        names = ", ".join(dict.fromkeys(job.variant for job in jobs))
        raise ConfigError(f"no variant fits '{only}': use one of {names}")
    return chosen


def _expand(name: str, change: Table) -> Iterator[tuple[str, Table]]:
    """A variant as it is, or one for every combination of the values in its grid."""
    change = as_table(change, f"compare.variants.{name}")
    plain = {key: value for key, value in change.items() if key != "grid"}
    grid = as_table(change.get("grid", {}), f"compare.variants.{name}.grid")
    if not all(isinstance(values, list) for values in grid.values()):
        raise ConfigError(f"every setting in the grid of '{name}' needs a list of values")
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        table = plain
        for key, value in chosen.items():
            table = merge(table, nest(key, value))
        label = ",".join(f"{key}={_label(value)}" for key, value in chosen.items())
        yield f"{name}/{label}" if label else name, table


def _seeds(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(seed) is int for seed in value)


def _label(value: Any) -> str:
    return "-".join(map(_label, value.values())) if isinstance(value, dict) else str(value)


def run_comparison(jobs: list[Job], workers: int, modules: Sequence[str] = ()) -> Iterator[Job]:
    """Run all jobs and yield each as it is done; `modules` register models of the user's."""
    threads = max(1, torch.get_num_threads() // workers)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, import_modules, (modules,)) as pool:
        try:
            futures = {pool.submit(_run, job, threads): job for job in jobs}
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def collect(jobs: list[Job], out: Path) -> list[dict[str, Any]]:
    """What every finished run gave, where and with what; also written to OUT/results.json."""
    rows = []
    for job in jobs:
        if not (job.folder / "evaluation.json").exists():
            continue
        evaluation = json.loads((job.folder / "evaluation.json").read_text())
        last = json.loads((job.folder / "metrics.jsonl").read_text().splitlines()[-1])
        config = job.config
        rows.append(
            {
                "variant": job.variant,
                "method": config.method.name,
                "data": config.data.source,
                "p": config.data.labeled_fraction,
                "k": evaluation["k"],
                "model": config.model,
                "seed": config.seed,
                "rounds": evaluation["round"],
                "accuracy": evaluation["accuracy"]["transductive"],
                "held_out": evaluation["accuracy"]["held_out"],
                "validation": last.get("validation_accuracy"),
                "seconds": last["seconds"],
                "padding": last["padding"],
                **{key: evaluation["cost"][key] for key in COSTS},
                **{key: evaluation[key] for key in ("device", "versions", "commit")},
            }
        )
    write_atomic(out / "results.json", json.dumps(rows, indent=2).encode())
    return rows


def summarize(rows: list[dict[str, Any]], out: Path) -> dict[str, dict[str, Any]]:
    """Mean, deviation and values over seeds, in percent; also written to OUT/summary.json.

    The top level is the transductive reading of accuracy on test clients; `held_out` is the other,
    and `validation`, for tuning, the accuracy on validation clients after the last round; `cost` is
    per client, and per round where it is of training.
    """
    summary: dict[str, dict[str, Any]] = {}
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        spreads = {key: _spread([row[key] for row in mine]) for key in READINGS}
        costs = {key: mine[0][key] for key in COSTS}
        summary[variant] = spreads.pop("accuracy") | spreads | {"cost": costs}
    write_atomic(out / "summary.json", json.dumps(summary, indent=2).encode())
    return summary


def _run(job: Job, threads: int) -> None:
    torch.set_num_threads(threads)
    for _ in train_run(job.config, job.folder, resume=True):
        pass
    evaluate_run(job.folder)


def _spread(values: list[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    mean = statistics.fmean(known) if known else None
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    return {"mean": mean, "std": spread, "seeds": values}
