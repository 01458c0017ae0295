"""Tables of `flowdup reproduce`, beside the paper's numbers: all that have results."""

import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from layout import Results, bold, grid, spread, tenths

Cell = dict[str, Any]


def reproduced(results: Results) -> str:
    """Every table with a result file, in the order of names, then the names of the others."""
    parts, missing = [], []
    names = sorted(path.stem for path in (results.root / "experiments").glob("*.toml"))
    for name in names:
        declared = tomllib.loads((results.root / f"experiments/{name}.toml").read_text())
        if "rows" not in declared:  # a comparison
            continue
        has_run = (results.root / f"results/{name}.json").exists()
        table = results.table(name) if has_run else {"cells": []}
        if done := [cell for cell in table["cells"] if cell["mean"] is not None]:
            parts.append(_section(table, done, results, "embedding" in declared))
        else:
            missing.append(f"- [{name}](../experiments/{name}.toml): {declared['title']}\n")
    if missing:
        parts.append("### Not run yet\n\n" + "".join(missing))
    return "\n".join(parts)


def _section(
    table: dict[str, Any], done: Sequence[Cell], results: Results, has_figure: bool
) -> str:
    seeds = len(table["seeds"])
    notes = [table["paper"], table["note"], table["unequal"] and f"Unequal: {table['unequal']}."]
    text = [
        f"### {table['title']}\n",
        f"[{table['table']}](../experiments/{table['table']}.toml). "
        + " ".join(note if note.endswith(".") else f"{note}." for note in notes if note)
        + f" {_measure(table['show'])}, up to {seeds} seed{'s' if seeds > 1 else ''}.\n",
        _short(table),
        _absent(table, done),
        _folded(f"{table['title']}: every cell", _detail(table["reference"], done)),
    ]
    if any("support" in cell for cell in done):
        text.append(_by_support(done))
    if "silhouette" in table:
        text.append(_figure(table, results))
    elif has_figure:
        text.append("Its figure has not been drawn yet.\n")
    text.append(_origins(done))
    return "\n".join(part for part in text if part)


def _absent(table: dict[str, Any], done: Sequence[Cell]) -> str:
    rows = [row for row in table["rows"] if row not in {cell["row"] for cell in done}]
    return f"Not run yet: {', '.join(rows)}.\n" if rows else ""


def _folded(title: str, text: str) -> str:
    """Shown when a reader asks for it, on a code host as on the site."""
    return f"<details markdown><summary>{title}</summary>\n\n{text}\n</details>\n"


def _measure(name: str) -> str:
    return {
        "accuracy": "Accuracy in percent",
        "held_out": "Accuracy in percent on the other half of a client's points",
        "worst_decile": "Accuracy in percent of the worst tenth of clients",
    }[name]


def _short(table: dict[str, Any]) -> str:
    """A line per row, the best of a column in bold, and the paper's line below where it has one.

    Rows that have not run are left out, but for the paper's line.
    """
    cells = {(cell["row"], cell["column"]): cell for cell in table["cells"]}
    columns, show = table["columns"], table["show"]
    own = {
        column: {row: mean_of(cells[row, column], show) for row in table["rows"]}
        for column in columns
    }
    best = {
        column: dict(
            zip(
                values,
                bold([spread_of(cells[r, column], show) for r in values], [*values.values()], max),
                strict=True,
            )
        )
        for column, values in own.items()
    }
    body = []
    for row in table["rows"]:
        paper = [paper_of(cells[row, column]) for column in columns]
        texts = [best[column][row] for column in columns]
        body += [[row, *texts]] if any(texts + paper) else []
        body += [["*paper*", *paper]] if any(paper) else []
    return grid(["", *columns], body)


def _detail(reference: str, cells: Sequence[Cell]) -> str:
    head = ["row", "column", "accuracy", "other half", "worst decile", "paper"]
    head += [f"difference to {reference}"] if reference else []
    body = []
    for cell in cells:
        measured = [spread_of(cell, name) for name in ("accuracy", "held_out", "worst_decile")]
        line = [cell["row"], cell["column"], *measured, paper_of(cell)]
        line += [_difference(cell)] if reference else []
        failed = f", {len(cell['failed'])} failed" if cell["failed"] else ""
        body.append([*line, f"{len(cell['seeds'])}{failed}", _chosen(cell)])
    return grid([*head, "seeds", "chosen on validation clients"], body)


def _by_support(cells: Sequence[Cell]) -> str:
    counts = list(cells[0]["support"])
    body = [
        [cell["row"], cell["column"], *(_tenths(cell["support"].get(n)) for n in counts)]
        for cell in cells
    ]
    return grid(["accuracy of models from so many points", "", *counts], body)


def _figure(table: dict[str, Any], results: Results) -> str:
    image = f"results/{table['table']}.png"
    silhouette = ", ".join(f"{name} {value:.2f}" for name, value in table["silhouette"].items())
    shown = f"![{table['title']}](../{image})\n\n" if (results.root / image).exists() else ""
    return f"{shown}{silhouette}\n"


def _values(cell: Cell, measure: str) -> list[float]:
    """Of seeds; clients of a single point have no other half."""
    return [value for value in cell["values"][measure] if value is not None]


def mean_of(cell: Cell, measure: str) -> float | None:
    """To a tenth, as it is shown, so that what looks alike is alike."""
    values = _values(cell, measure)
    return round(sum(values) / len(values), 1) if values else None


def spread_of(cell: Cell, measure: str) -> str:
    return spread(_values(cell, measure))


def paper_of(cell: Cell) -> str:
    if cell["paper_mean"] is None:
        return ""
    return f"{tenths(cell['paper_mean'])} ± {tenths(cell['paper_std'])}"


def _difference(cell: Cell) -> str:
    """Paired by seeds: the mean, and its standard error."""
    found = cell.get("difference", {}).get("accuracy", {})
    if found.get("mean") is None:
        return ""
    sign = "+" if found["mean"] >= 0 else ""
    error = found["standard_error"]
    return f"{sign}{tenths(found['mean'])}" + (f" ({tenths(error)})" if error is not None else "")


def _chosen(cell: Cell) -> str:
    if not cell["searched"]:
        return ""
    words = [f"{key} = {_value(value)}" for key, value in cell["searched"].items()]
    return f"`{', '.join(words)}` of {len(cell['tried'])}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{key} {_value(part)}" for key, part in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tenths(value: float | None) -> str:
    return "" if value is None else tenths(value)


def _origins(cells: Iterable[Cell]) -> str:
    found: dict[str, list[str]] = {"device": [], "torch": [], "precision": [], "commit": []}
    for cell in cells:
        for key, words in (
            ("device", _each(cell["device"])),
            ("torch", [v["torch"] for v in _each(cell["versions"])]),
            ("precision", [v["precision"] for v in _each(cell["engine"])]),
            ("commit", _each(cell["commit"])),
        ):
            found[key] += [word for word in words if word not in found[key]]
    return "; ".join(f"{key} {', '.join(words)}" for key, words in found.items()) + ".\n"


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
