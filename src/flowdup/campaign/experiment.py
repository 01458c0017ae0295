"""A table of experiments as a TOML file: rows, columns, seeds, searches, the paper's numbers.

    title = "Class-partitioned CIFAR-10, CNN"
    paper = "Table 1, left"                # where the numbers beside ours stand
    preset = "class-partitioned-cifar10"   # what every run begins with
    seeds = [0, 1, 2]
    reference = "FLowDUP"                  # the row that others are compared with, seed by seed

    [columns]                              # settings that a column has
    "p = 0.1" = { data = { labeled_fraction = 0.1 } }
    "digits" = { preset = "digits" }       # or a preset of its own, under the rows' settings

    [rows.FedAvg]                          # a row has settings of its own on top
    settings = { method = { name = "fedavg" } }
    search = { "client.optimizer.lr" = [0.03, 0.1] }   # every combination is tried
    paper = [[47.9, 0.1]]                  # mean and deviation in every column; []: not there
    seeds = [0, 1, 2, 3, 4]                # other seeds than the table's, where few say too little
    search_column = ""                     # not the table's; empty: every cell for itself

    [rows."FedAvg with k = 200"]
    like = "other-table/FedAvg"            # settings and search of a row in a file beside this one
    chosen = "other-table/FedAvg"          # or like it, with what was chosen there: no search (and
                                           # no search_column) here

A cell's search is decided by the accuracy on validation clients with the seeds `search_seeds` (the
first, if none are named); with `search_column`, in that column for the whole row.  Every row must
have equally many settings to choose from, or `unequal` must say why not.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowdup.campaign.cells import Candidate, Cell, Experiment, Run
from flowdup.config import load_table, merge, nest, override, read_config, read_toml
from flowdup.errors import ConfigError, shorten
from flowdup.settings import Table, as_table, nearest

MEASURES = ("accuracy", "held_out", "worst_decile")
_KEYS = {
    **{"title": str, "paper": str, "note": str, "preset": str, "reference": str, "unequal": str},
    **{"seeds": list, "search_seeds": list, "search_column": str, "support": list, "show": str},
    **{"embedding": dict, "settings": dict, "columns": dict, "rows": dict},
}
_ROW_KEYS = {"settings": dict, "search": dict, "paper": list, "seeds": list, "search_column": str}
_OTHER_ROW = ("like", "chosen")  # keys that name a row elsewhere
_EMBEDDING_KEYS = {"row": str, "column": str, "by": str}


def experiment_names() -> dict[str, Path]:
    """Tables that can be reproduced, by name: in ./experiments, or those that came with flowdup."""
    here = Path(__file__).resolve()
    places = [Path("experiments"), here.parents[1] / "experiments", here.parents[3] / "experiments"]
    found: dict[str, Path] = {}
    for place in places:
        for path in sorted(place.glob("*.toml")):
            if path.stem not in found and _has_rows(path):
                found[path.stem] = path
    return found


def load_experiment(
    name: str, engine: Sequence[str] = (), seeds: int = 0, rows: str = ""
) -> Experiment:
    """By the name of a table or the path of a TOML file.

    `engine` holds `engine.KEY=VALUE`, which changes no run's identity; `seeds`, if not 0, so many
    of the first alone; `rows`, names with commas between, those of its rows alone.
    """
    if name.endswith(".toml"):
        path = Path(name)
    else:
        known = experiment_names()
        if name not in known:
            use = f"use one of {', '.join(sorted(known))}" if known else "none is here"
            raise ConfigError(
                f"there is no table '{shorten(name)}'{nearest(name, list(known))}: {use}, or give "
                "a TOML file"
            )
        path = known[name]
    for text in engine:
        if not text.startswith("engine."):
            raise ConfigError(
                f"'{shorten(text)}' would make another run of it: only engine.KEY=VALUE can be set "
                "here, other settings belong into the table's file"
            )
    table = dict(read_toml(path))
    entries = table.get("rows")
    if not isinstance(entries, dict):
        return read_experiment(path.stem, table, engine, seeds, rows)
    table["rows"] = {row: _whole_row(row, entry, path) for row, entry in entries.items()}
    found = read_experiment(path.stem, table, engine, seeds, rows)
    choosers = {
        row: _chooser(row, entries[row], path, engine, found.search_seeds)
        for row in found.rows
        if "chosen" in entries[row]
    }
    cells = (replace(cell, chosen_by=choosers.get(cell.row)) for cell in found.cells)
    return replace(found, cells=tuple(cells))


def _whole_row(row: str, entry: Any, path: Path) -> Any:
    """A row with the settings and the search of the one that it is like."""
    named = [key for key in _OTHER_ROW if key in entry] if isinstance(entry, dict) else []
    if not named:
        return entry
    if len(named) > 1 or not isinstance(entry[named[0]], str):
        raise ConfigError(f"row '{row}' of {path} needs a text TABLE/ROW, as 'like' or as 'chosen'")
    name, _, other = entry[named[0]].partition("/")
    file = path.with_name(f"{name}.toml")
    found = read_toml(file).get("rows", {}).get(other)
    if not isinstance(found, dict) or {*_OTHER_ROW} & {*found}:
        raise ConfigError(
            f"row '{row}' of {path} is like '{entry[named[0]]}', but {file} has no row '{other}' "
            "that is like no other: give TABLE/ROW"
        )
    settings = merge(found.get("settings", {}), entry.get("settings", {}))
    whole = {"search": found.get("search", {})} | entry | {"settings": settings}
    return {key: value for key, value in whole.items() if key not in _OTHER_ROW}


def _chooser(
    row: str, entry: Table, path: Path, engine: Sequence[str], seeds: tuple[int, ...]
) -> Cell:
    """The cell of another table that chooses for a row of this one."""
    name, _, other = entry["chosen"].partition("/")
    there = load_experiment(str(path.with_name(f"{name}.toml")), engine, rows=other)
    deciders = {there.decider(cell).column for cell in there.cells}
    if len(deciders) > 1 or there.search_seeds != seeds or {"search", "search_column"} & {*entry}:
        raise ConfigError(
            f"row '{row}' of {path} has what '{entry['chosen']}' chose: that row needs one "
            "search_column and the same search_seeds, and this one no search of its own"
        )
    return there.decider(there.cells[0])


def read_experiment(
    name: str, table: Table, engine: Sequence[str] = (), seeds: int = 0, rows: str = ""
) -> Experiment:
    """From a table whose rows are whole: like no other."""
    _check_keys(table, _KEYS, name)
    if not table.get("rows") or not table.get("columns") or "preset" not in table:
        raise ConfigError(f"table '{name}' needs a preset, columns and rows")
    for kind in ("rows", "columns"):
        if comma := [title for title in table[kind] if "," in title]:
            raise ConfigError(
                f"{name}.{kind}.{comma[0]}: --{kind} has commas between {kind}, so none has one: "
                "rename it"
            )
    all_seeds = _seeds(table.get("seeds", [0, 1, 2]), f"{name}.seeds")
    search_seeds = _seeds(table.get("search_seeds", [all_seeds[0]]), f"{name}.search_seeds")
    if not set(search_seeds) <= set(all_seeds):
        raise ConfigError(f"{name}.search_seeds must be some of its seeds {list(all_seeds)}")
    _search_column(table, table, name)  # is one of its columns
    support = tuple(table.get("support", []))
    if any(type(points) is not int or points < 1 for points in support):
        raise ConfigError(f"{name}.support must have numbers of points, not {shorten(support)}")
    if (show := table.get("show", "accuracy")) not in MEASURES:
        raise ConfigError(f"{name}.show must be one of {', '.join(MEASURES)}, not '{show}'")
    known = list(table["rows"])
    wanted = [word.strip() for word in rows.split(",")] if rows else known
    if (reference := table.get("reference", known[0])) not in known:
        raise ConfigError(
            f"{name}.reference must be one of its rows {', '.join(known)}, not '{reference}'"
        )
    cells = []
    for row, entry in table["rows"].items():
        where = f"{name}.rows.{row}"
        _check_keys(as_table(entry, where), _ROW_KEYS, where)
        own = _seeds(entry.get("seeds", list(all_seeds)), f"{where}.seeds")[: seeds or None]
        cells += _row_cells(where, row, entry, table, own, search_seeds, engine)
    sizes = {len(cell.candidates) for cell in cells}
    if len(sizes) > 1 and "unequal" not in table:
        raise ConfigError(
            f"the rows of '{name}' have {' or '.join(map(str, sorted(sizes)))} settings to choose "
            "from: give all the same number, or say in 'unequal' why not"
        )
    return Experiment(
        name,
        **{key: table.get(key, "") for key in ("title", "paper", "note", "preset", "reference")},
        unequal=table.get("unequal", ""),
        search_seeds=search_seeds,
        support=support,
        show=show,
        columns=tuple(table["columns"]),
        rows=tuple(row for row in known if row in wanted),
        search={row: dict(entry.get("search", {})) for row, entry in table["rows"].items()},
        cells=tuple(cell for cell in cells if cell.row in wanted),
    )


def _row_cells(
    where: str,
    row: str,
    entry: Any,
    table: Table,
    seeds: tuple[int, ...],
    search_seeds: tuple[int, ...],
    engine: Sequence[str],
) -> list[Cell]:
    columns, search = table["columns"], entry.get("search", {})
    search_column = _search_column(entry, table, where)
    paper = entry.get("paper", [[]] * len(columns))
    if len(paper) != len(columns):
        raise ConfigError(
            f"{where}.paper has {len(paper)} entries for {len(columns)} columns: give a mean and a "
            "deviation for each, or [] where there is none"
        )
    if any(not isinstance(values, list) or not values for values in search.values()):
        raise ConfigError(f"{where}.search needs a list of values for every setting")
    figure = table.get("embedding", {})
    _check_keys(figure, _EMBEDDING_KEYS, "embedding")
    cells = []
    for number, (column, change) in enumerate(columns.items()):
        own = dict(as_table(change, f"columns.{column}"))
        if not isinstance(preset := own.pop("preset", table["preset"]), str):
            raise ConfigError(f"columns.{column}.preset must be a text, not {shorten(preset)}")
        base = load_table(preset)
        for over in (table.get("settings", {}), entry.get("settings", {}), own):
            base = merge(base, over)
        candidates = tuple(
            _candidate(
                base, dict(zip(search, values, strict=True)), {*search_seeds, *seeds}, engine
            )
            for values in itertools.product(*search.values())
        )
        embedded = (figure.get("row"), figure.get("column")) == (row, column)
        by = figure.get("by", "rotation") if embedded else ""
        pair = _pair(paper[number], where)
        cells.append(Cell(row, column, candidates, seeds, pair, search_column or column, by))
    return cells


def _candidate(
    settings: Table, searched: dict[str, Any], seeds: Iterable[int], engine: Sequence[str]
) -> Candidate:
    table = dict(settings)
    for key, value in searched.items():
        table = merge(table, nest(key, value))
    table = override(table, *engine)
    return Candidate(searched, {seed: Run(read_config(table | {"seed": seed})) for seed in seeds})


def _pair(value: Any, where: str) -> tuple[float, float] | None:
    if value == []:
        return None
    if not isinstance(value, list) or list(map(type, value)) not in ([float] * 2, [float, int]):
        raise ConfigError(f"{where}.paper must have pairs like [66.1, 1.5], not {shorten(value)}")
    return float(value[0]), float(value[1])


def _search_column(entry: Table, table: Table, where: str) -> str:
    """That of a row or, where it has none, of its table."""
    column: str = entry.get("search_column", table.get("search_column", ""))
    if column not in ["", *table["columns"]]:
        raise ConfigError(
            f"{where}.search_column must be one of its columns {', '.join(table['columns'])}, not "
            f"'{shorten(column)}'"
        )
    return column


def _seeds(value: Any, where: str) -> tuple[int, ...]:
    whole = isinstance(value, list) and value and all(type(seed) is int for seed in value)
    if not whole or len(set(value)) < len(value):
        raise ConfigError(f"{where} must be different whole numbers, not {shorten(value)}")
    return tuple(value)


def _check_keys(table: Table, keys: Mapping[str, type], where: str) -> None:
    for key, value in table.items():
        if key not in keys:
            raise ConfigError(
                f"'{where}' has an unknown key '{shorten(key)}'{nearest(key, list(keys))}"
            )
        if type(value) is not keys[key]:
            kind = {"str": "text", "dict": "table"}.get(keys[key].__name__, "list")
            raise ConfigError(f"'{where}': '{key}' must be a {kind}, not {shorten(value)}")


def _has_rows(path: Path) -> bool:
    """Whether a file is such a table, and not a comparison, without reading all of it strictly."""
    return re.search(r"^\[rows\.", path.read_text("utf-8"), re.MULTILINE) is not None
