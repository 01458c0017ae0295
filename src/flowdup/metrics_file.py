"""The contents of metrics.jsonl, and which rounds it lacks.

Sizes follow the lines that are there, never a round's number: anybody may have written that.
"""

from collections.abc import Iterable
from typing import Any

from flowdup.strict_json import read_lenient_json

Row = dict[str, Any]  # the metrics of one round
Interval = tuple[int, int]  # first and last, both in it

_MOST_ROUNDS = 10**12
_MOST_NAMED = 20  # of intervals in a sentence


def parse_metrics(content: bytes) -> tuple[list[Row], list[int]]:
    """Metrics by rounds, one for each, and the numbers of the lines that are no round's metrics.

    Of a round that was repeated the later line counts; a last line may be unfinished.
    """
    lines = [(i, line) for i, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    rows: dict[int, Row] = {}
    bad = []
    for i, line in lines:
        row = _parse_line(line)
        if row is not None:
            rows[row["round"]] = row
        elif i != lines[-1][0]:
            bad.append(i)
    return [rows[number] for number in sorted(rows)], bad


def _parse_line(line: bytes) -> Row | None:
    try:
        row = read_lenient_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("round")) is not int:
        return None
    return row if 0 < row["round"] <= _MOST_ROUNDS else None


def missing_rounds(rounds: Iterable[int], last: int) -> list[Interval]:
    """What of the rounds from 1 to `last` is not among these, which are in order."""
    found, due = [], 1
    for number in (*rounds, last + 1):
        if number > due:
            found.append((due, number - 1))
        due = number + 1
    return found


def list_ranges(intervals: list[Interval]) -> str:
    """Intervals of whole numbers as people list them: "3, 7 to 9"."""
    named = [str(a) if a == b else f"{a} to {b}" for a, b in intervals[:_MOST_NAMED]]
    if more := len(intervals) - len(named):
        named.append(f"and {more} more gaps")
    return ", ".join(named)
