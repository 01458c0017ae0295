"""The command `flowdup compare`: several methods, several seeds, one table and one page."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flowdup.commands.completion import complete_preset
from flowdup.commands.options import JobCount, Json, Only, Settings
from flowdup.interruption import Interruption
from flowdup.progress import Jobs
from flowdup.report import spread_text
from flowdup.run.comparison import choose, collect, read_comparison, summarize
from flowdup.run.comparison_page import write_comparison_page
from flowdup.run.workers import run_comparison


def compare(
    context: typer.Context,
    preset: Annotated[
        str,
        typer.Argument(
            help="A preset or a TOML file with a table 'compare'.", autocompletion=complete_preset
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder for all runs.")],
    settings: Settings = None,
    only: Only = "*",
    jobs: JobCount = 0,
    as_json: Json = False,
) -> None:
    """Train several methods with several seeds: one table, and one page beside the results."""
    work = read_comparison(preset, out, settings)
    chosen = choose(work, only)
    workers = min(jobs or os.cpu_count() or 1, len(chosen))
    with Interruption() as stop:
        done = run_comparison(chosen, workers, context.obj, stop)
        if as_json:
            for job in done:
                print(json.dumps({"done": str(job.run.path)}), flush=True)
        else:
            with Jobs(chosen) as progress:
                for _ in done:
                    progress.done()
        if stop.signal:
            stop.end_program()
    rows = collect(work, out)
    summary = summarize(rows, out)
    page = write_comparison_page(work, rows, out)
    if as_json:
        print(json.dumps(summary))
        return
    console = Console()
    labels = {job.variant: job.label or job.variant for job in work}
    console.print(comparison_table({labels[name]: row for name, row in summary.items()}))
    console.print(f"{page}; every run has a report.html", soft_wrap=True, highlight=False)


def comparison_table(rows: dict[str, dict[str, Any]]) -> Table:
    """In 80 characters; deviations of worst deciles are in the summary."""
    several = any(len(row["seeds"]) > 1 for row in rows.values())
    title = "accuracy of unlabeled test clients in percent, " + (
        "mean ± deviation over seeds" if several else "one seed"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("method", min_width=12, overflow="fold")
    heads = ("all", "worst\ndecile", "held-out:\nall", "worst\ndecile")
    for head in (*heads, "MB up", "GFLOP:\ntrain", "make\nmodel"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, row in rows.items():
        cost = row["cost"]
        table.add_row(
            name,
            _spread(row),
            _percent(row["worst_decile"]["mean"]),
            _spread(row["held_out"]),
            _percent(row["held_out_worst_decile"]["mean"]),
            f"{cost['bytes_up'] / 1e6:.2f}",
            *(f"{cost[key] / 1e9:.3f}" for key in ("train_flops", "personalize_flops")),
        )
    return table


def _spread(found: dict[str, Any]) -> str:
    return spread_text([value for value in found["seeds"] if value is not None])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
