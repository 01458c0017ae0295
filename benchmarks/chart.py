"""A bar chart of results: `python benchmarks/chart.py RESULTS.json CHART.png`."""

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from table import Result, by_work, digits, origin

from flowdup.files import write_atomic

OURS, THEIRS, INK = "#0072B2", "#C8C8C8", "#333333"


def draw(results: Sequence[Result], path: Path) -> None:
    """One panel per work, what was absent left out."""
    there = [row for row in results if time(row)]
    panels = by_work(there)
    heights = [len(group) + 1.2 for _, group in panels]
    figure = Figure(figsize=(7, 0.27 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axis, (work, group) in zip(axes, panels, strict=True):
        rows = sorted(group, key=lambda row: -time(row))
        names, times = [row["contender"] for row in rows], [time(row) for row in rows]
        own = ("flowdup", "personalize", "Federation")
        ours = [name.startswith(own) and not name.endswith("before") for name in names]
        bars = axis.barh(names, times, color=[OURS if mine else THEIRS for mine in ours])
        axis.bar_label(bars, [f" {digits(t)}" for t in times])
        unit = "ms" if rows[0].get("ms_per_round") else "s"
        axis.set_title(f"{work}, {unit}", loc="left", fontsize=10, color=INK)
        axis.margins(x=0.12)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False, colors=INK)
    figure.supxlabel(f"{origin(there[0])}, medians", fontsize=8, color=INK)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    write_atomic(path, out.getvalue())


def time(row: Result) -> float:
    """Milliseconds per round, or seconds of a whole run; 0 if there is neither."""
    return row.get("ms_per_round") or row.get("seconds") or 0.0


def main() -> None:
    source, path = map(Path, sys.argv[1:])
    draw(json.loads(source.read_bytes()), path)


if __name__ == "__main__":
    main()
