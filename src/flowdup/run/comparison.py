"""Several methods on the same clients, several seeds each: one table of metrics.

A comparison is a configuration with a table `compare` on top:

    [compare]
    seeds = [0, 1, 2]
    [compare.variants.fedavg]         # what differs from the rest of the file
    method = {name = "fedavg"}
    [compare.variants.fedavg.grid]    # perhaps: lists of values, every combination a variant
    "client.optimizer.lr" = [0.1, 0.3]

Every run is an ordinary run folder OUT/VARIANT/seed-N in a process of its own (`workers.py`);
finished ones are kept and broken ones continued when the comparison is started again.
"""

import itertools
import statistics
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from flowdup.config import (
    load_table,
    merge,
    nest,
    override,
    read_config,
    tell_of_kept_stages,
)
from flowdup.errors import CheckpointError, ConfigError
from flowdup.metrics import METRICS
from flowdup.run.folder import ComparisonFolder
from flowdup.run.round_metrics import validated
from flowdup.run.workers import Job
from flowdup.settings import Table, as_table

# of accuracy, by reading and on validation clients: the mean over clients, and over the worst tenth
ACCURACIES = (
    "accuracy",
    "worst_decile",
    "held_out",
    "held_out_worst_decile",
    "validation",
    "validation_worst_decile",
)
COSTS = ("points", "parameters", "bytes_down", "bytes_up", "train_flops", "personalize_flops")
ABOUT = (
    *("variant", "method", "data", "p", "k", "model", "seed"),
    *("rounds", "round", "seconds", "padding", "epsilon"),
)
WHERE = ("device", "versions", "commit")


def read_comparison(name: str, out: Path, overrides: list[str] | None = None) -> list[Job]:
    """The runs of a comparison: every variant with every seed."""
    table = dict(load_table(name))
    compare = as_table(table.pop("compare", {}), "compare")
    seeds, variants = compare.get("seeds", []), as_table(compare.get("variants", {}), "variants")
    if set(compare) != {"seeds", "variants"} or not _seeds(seeds) or not variants:
        raise ConfigError(
            f"'{name}' needs a table 'compare' with 'seeds' (whole numbers) and 'variants'"
        )
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"'{name}' names a seed twice in {seeds}: name each once")
    own_stages = any("before" in as_table(change, name) for name, change in variants.items())
    if own_stages and any(text.startswith("before.") for text in overrides or []):
        raise ConfigError(
            "--set cannot change the stages of variants: change them where the variant has them, "
            "or by its 'grid'"
        )
    base, table = table, override(table, *overrides or [])
    tell_of_kept_stages(base, table)
    for change in variants.values():
        tell_of_kept_stages(table, merge(table, as_table(change, name)))
    _check_metric_names()
    changes = [v for name, change in variants.items() for v in _expand(name, change)]
    if len({label for _, label, _ in changes}) < len(changes):  # a name that looks like a grid's
        changes = [(variant, variant, change) for variant, _, change in changes]
    _check_apart([variant for variant, _, _ in changes], seeds, ComparisonFolder(out))
    return [
        Job(
            variant,
            read_config(merge(table, change) | {"seed": seed}),
            ComparisonFolder(out).run(variant, seed),
            label=label,
        )
        for seed in seeds
        for variant, label, change in changes
    ]


def _check_apart(variants: list[str], seeds: list[int], folder: ComparisonFolder) -> None:
    """Every run must have a folder of its own, inside the comparison's and inside no other run."""
    taken = {
        folder.results.resolve(): "the results",
        folder.summary.resolve(): "the summary",
        folder.page.resolve(): "the page",
    }
    above: dict[Path, str] = {}  # whose run is somewhere inside
    for variant in variants:
        parts = Path(variant).parts
        if not parts or ".." in parts or Path(variant).is_absolute() or not variant.isprintable():
            raise ConfigError(
                f"a variant is named '{variant}', which is no folder inside {folder.path}: choose "
                "a name without '..', '/' at the beginning and unprintable characters"
            )
        for seed in seeds:
            path = folder.run(variant, seed).path.resolve()
            owner = next((taken[p] for p in (path, *path.parents) if p in taken), above.get(path))
            if owner:
                raise ConfigError(
                    f"variant '{variant}' would share a folder with {owner}: rename one of them"
                )
            taken[path] = f"variant '{variant}'"
            above |= dict.fromkeys(path.parents, taken[path])


def choose(jobs: list[Job], only: str) -> list[Job]:
    """Those whose variant fits a pattern, with the values of its grid or without."""

    def fits(variant: str) -> bool:
        return fnmatchcase(variant, only) or fnmatchcase(variant.partition("/")[0], only)

    chosen = [job for job in jobs if fits(job.variant)]
    if not chosen:
        names = ", ".join(dict.fromkeys(job.variant for job in jobs))
        raise ConfigError(f"no variant fits '{only}': use one of {names}")
    return chosen


def _expand(name: str, change: Table) -> Iterator[tuple[str, str, Table]]:
    """A variant as it is, or one for every combination of the values in its grid: its name, its
    label for people, and what it changes.
    """
    change = as_table(change, f"compare.variants.{name}")
    plain = {key: value for key, value in change.items() if key != "grid"}
    grid = as_table(change.get("grid", {}), f"compare.variants.{name}.grid")
    if not all(isinstance(values, list) for values in grid.values()):
        raise ConfigError(f"every setting in the grid of '{name}' needs a list of values")
    short = _short_keys([key for key, values in grid.items() if len(values) > 1])
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        table = plain
        for key, value in chosen.items():
            table = merge(table, nest(key, value))
        folder = ",".join(f"{key}={_label(value)}" for key, value in chosen.items())
        label = ", ".join(f"{short[key]}={_label(chosen[key])}" for key in short)
        yield f"{name}/{folder}" if folder else name, f"{name} {label}".strip(), table


def _short_keys(keys: list[str]) -> dict[str, str]:
    """Every key as short as tells it from the others: `lr`, `client lr`, or all of it."""
    for shorten in (lambda parts: parts[-1:], lambda parts: [parts[0], parts[-1]]):
        short = [" ".join(shorten(key.split("."))) for key in keys]
        if len(set(short)) == len(keys):
            return dict(zip(keys, short, strict=True))
    return {key: key for key in keys}


def _seeds(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(seed) is int for seed in value)


def _label(value: Any) -> str:
    return "-".join(map(_label, value.values())) if isinstance(value, dict) else str(value)


def collect(jobs: list[Job], out: Path) -> list[dict[str, Any]]:
    """What every finished run gave, where and with what; also written to OUT/results.json.

    `accuracy` and `worst_decile` are the transductive reading on test clients, `held_out` and
    `held_out_worst_decile` the other, both in percent; other metrics are means over clients, under
    their names and with `held_out_` before them.
    """
    rows = [row for job in jobs if (row := _checked_row(job))]
    ComparisonFolder(out).write_results(rows)
    return rows


def _checked_row(job: Job) -> dict[str, Any]:
    """A run's row; CheckpointError if its evaluation was changed."""
    try:
        row = _row(job)
        numbers = [row[key] for key in (*ACCURACIES, *COSTS) if row and row[key] is not None]
        if all(type(number) in (int, float) for number in numbers):
            return row
    except (KeyError, TypeError, IndexError, AttributeError):
        pass  # as a value of the wrong type
    raise CheckpointError(
        f"{job.run.evaluation} or {job.run.metrics} was changed: run `flowdup evaluate "
        f"{job.run.path}`, or restore them"
    )


def _row(job: Job) -> dict[str, Any]:
    evaluation = job.run.read_evaluation()
    if not evaluation:
        return {}
    if "metrics" not in evaluation:
        raise CheckpointError(
            f"{job.run.evaluation} is of an older flowdup: run `flowdup evaluate {job.run.path}`"
        )
    transductive, held_out = (evaluation["metrics"][r] for r in ("transductive", "held_out"))
    rows, config = job.run.read_metrics(), job.config
    last = rows[-1] if rows else {}
    evaluations = validated(rows, len(config.before))
    kept = next((found for found in evaluations if found.round == evaluation["round"]), None)
    return {
        "variant": job.variant,
        "method": config.method.name,
        "data": config.data.source,
        "p": config.data.labeled_fraction,
        "k": evaluation["k"],
        "model": config.model,
        "seed": config.seed,
        "rounds": config.rounds,
        "round": evaluation["round"],
        "accuracy": transductive["accuracy"]["mean"],
        "worst_decile": transductive["accuracy"]["worst_decile"],
        "held_out": held_out["accuracy"]["mean"],
        "held_out_worst_decile": held_out["accuracy"]["worst_decile"],
        "validation": kept.accuracy if kept else None,
        "validation_worst_decile": kept.worst_decile if kept else None,
        **_means(transductive, ""),
        **_means(held_out, "held_out_"),
        "seconds": last.get("seconds"),
        "padding": last.get("padding"),
        "epsilon": last.get("epsilon"),
        **{key: evaluation["cost"][key] for key in COSTS},
        **{key: evaluation[key] for key in WHERE},
    }


def _means(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Of all metrics but accuracy."""
    return {f"{prefix}{n}": summary["mean"] for n, summary in table.items() if n != "accuracy"}


def summarize(rows: list[dict[str, Any]], out: Path) -> dict[str, dict[str, Any]]:
    """Mean, deviation (None of one seed) and values over seeds; also written to OUT/summary.json.

    The top level is accuracy on test clients in the transductive reading, in percent; the other
    columns of `collect` that measure stand under their names.  `validation`, for tuning, is the
    accuracy on validation clients after the round that is kept; `cost` is per client, and per round
    where it is of training.
    """
    summary: dict[str, dict[str, Any]] = {}
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        measured = [k for k in mine[0] if k in ACCURACIES or k.removeprefix("held_out_") in METRICS]
        spreads = {key: _spread([row.get(key) for row in mine]) for key in measured}
        costs = {key: mine[0][key] for key in COSTS}
        summary[variant] = spreads.pop("accuracy") | spreads | {"cost": costs}
    ComparisonFolder(out).write_summary(summary)
    return summary


def _check_metric_names() -> None:
    """Before anything is trained: metrics stand beside other columns, under their names."""
    taken = {*ABOUT, *ACCURACIES[1:], *COSTS, *WHERE, "mean", "std", "seeds", "cost"}
    for name in METRICS:
        if name in taken or f"held_out_{name}" in taken or name.startswith("held_out_"):
            raise ConfigError(
                f"a metric cannot be named '{name}' in a comparison, a column of its results has "
                "that name: register it under another"
            )


def _spread(values: list[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    mean = statistics.fmean(known) if known else None
    spread = statistics.stdev(known) if len(known) > 1 else None
    return {"mean": mean, "std": spread, "seeds": values}
