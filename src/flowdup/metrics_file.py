"""The contents of metrics.jsonl, and which rounds it lacks.

Sizes follow the lines that are there, never a round's number: anybody may have written that.
"""

from collections.abc import Iterable

Interval = tuple[int, int]  # first and last, both in it

_MOST_NAMED = 20  # of intervals in a sentence


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
