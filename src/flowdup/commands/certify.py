"""The command `flowdup certify`: how wrong models of clients without labels may be."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flowdup.commands.options import Json
from flowdup.engines.distributed import is_main_process
from flowdup.progress import Preparing
from flowdup.report.certificate_figure import certificate_figure
from flowdup.run import RunFolder, certify_run
from flowdup.run.results import write_report


def certify(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    route: Annotated[
        list[str] | None,
        typer.Option(help="held-out-clients, client-quantile, prediction-sets or pac-bayes."),
    ] = None,
    delta: Annotated[float, typer.Option(help="The share of failures that is allowed.")] = 0.05,
    coverage: Annotated[float, typer.Option(help="Of prediction sets.")] = 0.9,
    share: Annotated[float, typer.Option(help="Of clients, for client-quantile.")] = 0.9,
    source: Annotated[
        Path | None,
        typer.Option("--input", help="Labeled clients that the run has never seen."),
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Samples of the stochastic predictor.")] = 1000,
    as_json: Json = False,
) -> None:
    """Bound the error of clients without labels, by several routes.

    It needs labeled clients that nothing has used: train with --set data.certify_clients=100. Each
    bound holds with confidence 1 - delta by itself, under what it assumes. certificate.json in the
    run folder then gives personal models their prediction sets.
    """
    with Preparing(quiet=as_json):
        result = certify_run(
            folder,
            route or (),
            delta,
            coverage=coverage,
            share=share,
            draws=draws,
            source=source,
        )
    rows = result["certificate"]
    figure = RunFolder(folder).certificate.with_suffix("")
    if is_main_process():
        certificate_figure(rows, figure)
        write_report(folder)
    if as_json:
        print(json.dumps(rows))
        return
    console = Console(quiet=not is_main_process())
    measured = {n: v for n, v in result["measured"].items() if v is not None}
    texts = ", ".join(f"{name} clients {value:.3f}" for name, value in measured.items())
    console.print(f"measured error: {texts}", soft_wrap=True, highlight=False)
    console.print(_table(rows, delta))
    for sentence in (*_above(rows), *_sentences(rows)):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)
    console.print(f"figure {figure}.png and .svg", soft_wrap=True, markup=False, highlight=False)


def _table(rows: list[dict[str, Any]], delta: float) -> Table:
    title = f"error at most, each with confidence {1 - delta:.0%} by itself; 1 or more says nothing"
    caption = "measured: at test clients, or training clients without labels if these are bounded"
    table = Table("route", title=title, title_justify="left", caption=caption)
    table.caption_justify = "left"
    for head in ("at most", "starts from", "measured"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        numbers = (row[key] for key in ("bound", "empirical_risk", "measured_error_unlabeled"))
        texts = ("-" if number is None else f"{number:.3f}" for number in numbers)
        table.add_row(row["route"], *texts)
    return table


def _above(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Which bounds on clients' errors lie below what was measured, and why that may be; the sets of
    classes hold on average alone, so that what they miss lies above as often as below.
    """
    for row in rows:
        bound, measured = row["bound"], row["measured_error_unlabeled"]
        of_sets = row["route"].startswith("prediction-sets")
        if bound is not None and measured is not None and measured > bound and not of_sets:
            yield (
                f"{row['route']}: measured above its bound, by chance (of the bound, or of few "
                "clients to measure at) or because these clients break what it assumes (below)"
            )


def _sentences(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For each route what it assumes, or why it cannot be given, and its terms and settings."""
    for row in rows:
        terms: Mapping[str, Any] = row["terms"]
        numbers = {k: v for k, v in terms.items() if isinstance(v, int | float)}
        listed = ", ".join(f"{k} {v:.4g}" for k, v in numbers.items())
        said = (row["refused"], row["data"], terms.get("sentence"), row["assumes"], listed)
        yield f"{row['route']}: {'; '.join(filter(None, said))}"
