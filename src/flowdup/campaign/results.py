"""A table's results: every cell's mean over seeds, beside the paper's, and paired differences.

`results/TABLE.json` follows from the table's file and the records alone.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowdup.campaign.cells import Cell, Experiment
from flowdup.campaign.identity import distinct_settings
from flowdup.campaign.records import Record, Records, accuracies, by_support
from flowdup.campaign.selection import choose
from flowdup.files import write_atomic
from flowdup.report import embedding_figure

_WHERE = ("device", "versions", "commit", "engine")


def collect(experiment: Experiment, records: Records) -> dict[str, Any]:
    """What the records say of a table; a cell without runs has no mean."""
    cells = {(cell.row, cell.column): _cell(experiment, cell, records) for cell in experiment.cells}
    for (_, column), cell in cells.items():
        reference = cells.get((experiment.reference, column))
        if reference and reference is not cell:
            cell["difference"] = _differences(cell, reference)
    return {
        "table": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "note": experiment.note,
        "unequal": experiment.unequal,
        "show": experiment.show,
        "reference": experiment.reference,
        "columns": list(experiment.columns),
        "rows": list(experiment.rows),
        "seeds": list(experiment.seeds),
        "search_seeds": list(experiment.search_seeds),
        "search": experiment.search,
        "cells": list(cells.values()),
    }


def write_results(experiment: Experiment, records: Records, folder: Path) -> Path:
    """Write FOLDER/TABLE.json, and a figure beside it where the table asks for one."""
    path = folder / f"{experiment.name}.json"
    table = collect(experiment, records)
    for cell in experiment.cells:
        if cell.embedded and (found := _embedding(experiment, cell, records)):
            vectors = np.array(found["vectors"], dtype=np.float32)
            drawing = path.with_suffix("")
            table["silhouette"] = embedding_figure(vectors, found["traits"], found["by"], drawing)
    write_atomic(path, (json.dumps(table, indent=1) + "\n").encode())
    return path


def _cell(experiment: Experiment, cell: Cell, records: Records) -> dict[str, Any]:
    choice = choose(experiment, cell, records)
    shown = choice.candidate or cell.candidates[0]
    config = shown.runs[cell.seeds[0]].config
    found: dict[int, Record] = {}
    failed: dict[str, str] = {}
    if choice.candidate:
        for seed in cell.seeds:
            record = records.get(choice.candidate.runs[seed]) or {}
            if "test" in record:
                found[seed] = record
            elif "failed" in record:
                failed[str(seed)] = record["failed"]
    values = {seed: accuracies(record) for seed, record in found.items()}
    paper_mean, paper_std = cell.paper or (None, None)
    result: dict[str, Any] = {
        "row": cell.row,
        "column": cell.column,
        "method": config.method.name,
        "data": config.data.source,
        "model": config.model,
        "p": config.data.labeled_fraction,
        "k": next((record["k"] for record in found.values()), None),
        **_spread([v["accuracy"] for v in values.values()]),
        "seeds": list(found),
        "held_out": _mean([v["held_out"] for v in values.values()]),
        "worst_decile": _mean([v["worst_decile"] for v in values.values()]),
        "paper_mean": paper_mean,
        "paper_std": paper_std,
        "values": {
            key: [v[key] for v in values.values()]
            for key in ("accuracy", "held_out", "worst_decile", "held_out_worst_decile")
        },
        "searched": shown.searched if choice.candidate else None,
        "searched_in": experiment.decider(cell).column,
        "tried": choice.tried,
        "settings": distinct_settings(_without_seed(found)) if found else None,
        "rounds": config.rounds,
        "kept_rounds": [record["round"] for record in found.values()],
        **{key: _first_cost(found, key) for key in ("bytes_up", "bytes_once")},
        "seconds": _mean([record["seconds"] for record in found.values()]),
        "failed": failed,
        "runs": {str(seed): record["digest"] for seed, record in found.items()},
        **{key: _distinct([record[key] for record in found.values()]) for key in _WHERE},
    }
    if experiment.support:
        tables = [by_support(record) for record in found.values() if "support" in record]
        result["support"] = {
            str(points): _mean([table[points] for table in tables if points in table])
            for points in experiment.support
        }
    return result


def _first_cost(found: dict[int, Record], key: str) -> int | None:
    """A client's, the same for every seed."""
    return next((record["cost"][key] for record in found.values()), None)


def _differences(cell: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """To the reference row with the same seeds: same clients, same labels, same cohorts."""
    common = [seed for seed in cell["seeds"] if seed in reference["seeds"]]
    result: dict[str, Any] = {"to": reference["row"], "seeds": common}
    for measure in ("accuracy", "held_out"):
        mine, other = (
            dict(zip(side["seeds"], side["values"][measure], strict=True))
            for side in (cell, reference)
        )
        gaps = [mine[s] - other[s] for s in common if None not in (mine[s], other[s])]
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
        result[measure] = {"mean": _mean(gaps), "standard_error": error}
    return result


def _embedding(experiment: Experiment, cell: Cell, records: Records) -> Record | None:
    chosen = choose(experiment, cell, records).candidate
    record = records.get(chosen.runs[cell.seeds[0]]) if chosen else None
    found: Record | None = record.get("embedding") if record else None
    return found


def _without_seed(found: dict[int, Record]) -> dict[str, Any]:
    settings: dict[str, Any] = next(iter(found.values()))["settings"]
    return {key: value for key, value in settings.items() if key != "seed"}


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": _mean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def _distinct(values: Sequence[Any]) -> Any:
    """One value if all seeds have the same, otherwise a list of the different ones."""
    different = [value for i, value in enumerate(values) if value not in values[:i]]
    return different[0] if len(different) == 1 else different or None
