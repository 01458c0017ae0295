"""Results as a Markdown table, one for each work."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

Result = dict[str, Any]


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "ms_per_round": ("ms", digits),
    "seconds": ("s", digits),
    "quartiles": ("quartiles", lambda pair: " - ".join(map(digits, pair))),
    "first_round_s": ("first, s", digits),
    "ratio_to_pfl": ("pfl / it", "{:.2f}".format),
    "ratio_to_flower": ("Flower / it", "{:.2f}".format),
    "ratio_to_h1": ("it / h1", "{:.2f}".format),
    "ratio_to_before": ("before / it", "{:.3f}".format),
    "distance": ("psi apart", "{:.0e}".format),
    "absent": ("absent", str),
    "failed": ("failed", str),
    "mismatch": ("other work", str),
}


def origin(row: Result) -> str:
    """Where a result was measured; a key that is missing is left out."""
    torch = row.get("versions", {}).get("torch")
    commit = row.get("commit")
    parts = row.get("device"), torch and f"torch {torch}", commit and f"commit {commit}"
    return ", ".join(filter(None, parts))


def by_work(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    return [(work, list(group)) for work, group in groupby(results, lambda row: row["work"])]


def markdown(results: Sequence[Result]) -> str:
    return "\n".join(_table(work, rows) for work, rows in by_work(results))


def _table(work: str, rows: Sequence[Result]) -> str:
    keys = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    lines = [[work, *(COLUMNS[key][0] for key in keys)], ["---", *["---:"] * len(keys)]]
    for row in rows:
        cells = [COLUMNS[k][1](row[k]) if row.get(k) is not None else "" for k in keys]
        lines.append([row["contender"], *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
