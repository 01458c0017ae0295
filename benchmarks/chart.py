"""Results of a contest as a table and as bars."""

import io
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flowdup.files import write_atomic

Result = dict[str, Any]
OURS, THEIRS, INK = "#0072B2", "#C8C8C8", "#333333"


COLUMNS = {
    "ratio_to_pfl": "pfl / it",
    "ratio_to_flower": "Flower / it",
    "ratio_to_h1": "it / h1",
}


def show(results: Sequence[Result]) -> None:
    console = Console()
    for work, group in by_work(results):
        ratios = [key for key in COLUMNS if any(row.get(key) for row in group)]
        table = Table("contender", title=work, title_justify="left")
        for column in ("ms", "quartiles", *(COLUMNS[key] for key in ratios), "psi apart"):
            table.add_column(column, justify="right")
        for row in group:
            if row["ms_per_round"] is None:
                table.add_row(row["contender"], "absent", row["absent"])
                continue
            apart = row["distance"]
            table.add_row(
                row["contender"],
                digits(row["ms_per_round"]),
                " - ".join(map(digits, row["quartiles"])),
                *(f"{row[key]:.2f}" for key in ratios),
                f"{apart:.0e}" if apart is not None else "",
            )
        console.print(table)


def draw(results: Sequence[Result], path: Path) -> None:
    """Bars of milliseconds, one panel per work, what was absent left out."""
    there = [row for row in results if row["ms_per_round"] is not None]
    panels = by_work(there)
    heights = [len(group) + 1.2 for _, group in panels]
    figure = Figure(figsize=(7, 0.27 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axis, (work, group) in zip(axes, panels, strict=True):
        rows = sorted(group, key=lambda row: -row["ms_per_round"])
        names, times = ([row[key] for row in rows] for key in ("contender", "ms_per_round"))
        ours = [name.startswith(("flowdup", "personalize", "Federation")) for name in names]
        bars = axis.barh(names, times, color=[OURS if own else THEIRS for own in ours])
        axis.bar_label(bars, [f" {digits(time)}" for time in times])
        axis.set_title(f"{work}, ms", loc="left", fontsize=10, color=INK)
        axis.margins(x=0.12)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False, colors=INK)
    device, versions = there[0]["device"], there[0]["versions"]
    figure.supxlabel(f"{device}, torch {versions['torch']}, medians", fontsize=8, color=INK)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    write_atomic(path, out.getvalue())


def by_work(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    return [(work, list(group)) for work, group in groupby(results, lambda row: row["work"])]


def digits(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
