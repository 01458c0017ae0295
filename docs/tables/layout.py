"""Result files, and how their figures are written in a table."""

import json
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from table import Result, origin


class Results:
    """Result files of a checkout, read when a table asks for them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def runs(self, name: str) -> list[Result]:
        """Of a comparison."""
        rows: list[Result] = self._read(f"results/{name}.json")
        return rows

    def table(self, name: str) -> dict[str, Any]:
        """Of `flowdup reproduce`: what it says of itself, and its cells."""
        found: dict[str, Any] = self._read(f"results/{name}.json")
        return found

    def bench(self, name: str) -> list[Result]:
        """Of a benchmark."""
        rows: list[Result] = self._read(f"benchmarks/results/{name}.json")
        return rows

    def _read(self, file: str) -> Any:
        return json.loads((self.root / file).read_bytes())


def grid(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def known(rows: Sequence[Result], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def tenths(value: float) -> str:
    """One decimal, a half rounded up as a reader would do it: 98.25 is 98.3."""
    return str(Decimal(str(round(value, 6))).quantize(Decimal("0.1"), ROUND_HALF_UP))


def spread(values: Sequence[float]) -> str:
    """Mean and deviation over seeds."""
    if not values:
        return ""
    return tenths(fmean(values)) + (f" ± {tenths(stdev(values))}" if len(values) > 1 else "")


def bold(texts: Sequence[str], values: Sequence[float | None], best: Any) -> list[str]:
    """The best of several in bold, `best` being min or max."""
    there = [value for value in values if value is not None]
    return [
        f"**{text}**" if len(there) > 1 and value == best(there) else text
        for text, value in zip(texts, values, strict=True)
    ]


def origins(rows: Sequence[Result]) -> str:
    return "; ".join(dict.fromkeys(map(origin, rows))) + ".\n"
