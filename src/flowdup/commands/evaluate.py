"""The command `flowdup evaluate`: metrics of clients by their own models, or by one saved model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowdup.commands.completion import complete_setting
from flowdup.commands.options import Json
from flowdup.engines.distributed import is_main_process
from flowdup.errors import ConfigError, shorten
from flowdup.evaluation import FIXED, PERCENTILES
from flowdup.metrics import METRICS
from flowdup.progress import Preparing
from flowdup.run import evaluate_model, evaluate_run

_MOST_COLUMNS = 12  # classes of a matrix that is printed
_MOST_NAMED = 10  # pairs of classes that are printed instead
_LONGEST_NAME = 12  # letters of a class's name above a column

Matrix = Sequence[Sequence[int]]


def evaluate(
    path: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or a model from `personalize`.")
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            "--input", help="Other clients: a folder or a table of them, or one client's own file."
        ),
    ] = None,
    group: Annotated[
        str, typer.Option(help="train, validation or test clients; by default test.")
    ] = "",
    set_sizes: Annotated[
        str, typer.Option(help="Score models made from 1,5,25 unlabeled points, too.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Other data than the run's: data.KEY=VALUE",
            autocompletion=complete_setting,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Personalize clients from their unlabeled points and print their metrics.

    The clients are the run's test clients, or others: --group chooses among the run's own, --input
    reads your own, --set data.KEY=VALUE makes others. A saved model is scored as it is.
    """
    sizes, others = _whole_numbers(set_sizes), settings or []
    is_model = path.is_file()
    if is_model and sizes:
        raise ConfigError(f"{path} is a model already: give a run folder, or no --set-sizes")
    with Preparing(quiet=as_json):
        if is_model:
            result = evaluate_model(path, source, group=group, settings=others)
        else:
            result = evaluate_run(path, None, sizes, group=group, source=source, settings=others)
    if as_json:
        print(json.dumps(result))
        return
    console = Console(quiet=not is_main_process())
    for part in _parts(result):
        console.print(part)


def _parts(result: Mapping[str, Any]) -> Iterator[str | Table]:
    count = len(result["clients"])
    labeled = sum(any(client["metrics"].values()) for client in result["clients"])
    group = f"{result['group']} " if result["group"] else ""
    clients = f"{count} {group}client{'' if count == 1 else 's'}"
    if labeled < count:
        clients += f", {labeled} of them with labels"
    if FIXED in result["metrics"]:
        yield f"a model of kind {result['model']}, as it is, at {clients}"
    else:
        yield (
            f"{result['method']} after round {result['round']}, {clients}; "
            "their models are made from all of their points and scored on them (transductive), or "
            "made from one half and scored on the other (held-out)"
        )
    if trained := result.get("trained_on"):
        who = "they" if trained == count else f"{trained} of them"
        yield f"beware: {who} took part in training, so that others may do worse"
    fewer = {f"from {row['points']}": row["metrics"] for row in result.get("support", [])}
    columns = {"mean": "mean", "std": "deviation", "worst_decile": "worst decile", "worst": "worst"}
    title = "over clients"
    yield _table(title, result["metrics"] | fewer, columns)
    shares = {f"p{share}": f"{share}%" for share in PERCENTILES}
    yield _table("percentiles over clients", result["percentiles"], shares)
    if result["confusion"]:
        reading, matrix = next(reversed(result["confusion"].items()))
        if not any(map(any, matrix)):
            yield _why_empty(_spoken(reading), result["clients"])
            return
        names = result["class_names"] or list(map(str, range(len(matrix))))
        yield from _confusion(_spoken(reading), matrix, names)


def _table(
    title: str,
    readings: Mapping[str, Mapping[str, Mapping[str, float | None]]],
    columns: Mapping[str, str],
) -> Table:
    table = Table("", "metric", title=title)
    for head in columns.values():
        table.add_column(head, justify="right", no_wrap=True)
    for reading, rows in readings.items():
        table.add_section()
        for i, (name, found) in enumerate(rows.items()):
            unit = METRICS[name].unit
            digits = 1 if unit == "%" else 3
            values = (found.get(column) for column in columns)
            texts = ("-" if value is None else f"{value:.{digits}f}" for value in values)
            first = "" if i else _spoken(reading)
            table.add_row(first, name.replace("_", " ") + (f" ({unit})" if unit else ""), *texts)
    return table


def _why_empty(reading: str, clients: Sequence[Mapping[str, Any]]) -> str:
    """Instead of a matrix without a point."""
    few = all(client["points"] < 2 for client in clients if any(client["metrics"].values()))
    if few:
        return f"no {reading} figures: the clients with labels have too few points to be halved"
    return f"no {reading} figures: no point with a label is in the half that is scored"


def _confusion(reading: str, matrix: Matrix, names: Sequence[str]) -> Iterator[Table | str]:
    """The matrix of classes that occur, or the most frequent confusions where they are many."""
    there = [i for i, row in enumerate(matrix) if any(row) or any(r[i] for r in matrix)]
    if len(there) > _MOST_COLUMNS:
        yield from _most_confused(reading, matrix, names)
        return
    # a table's own title is broken into pieces as narrow as the table
    yield f"confusion matrix, {reading}: points of a class (rows) by prediction (columns)"
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for j in there:
        table.add_column(Text(shorten(names[j], _LONGEST_NAME)), justify="right", overflow="fold")
    for i in there:
        right = [Text(str(matrix[i][j]), "bold" if i == j else "") for j in there]
        table.add_row(Text(shorten(names[i])), *right)
    yield table


def _most_confused(reading: str, matrix: Matrix, names: Sequence[str]) -> Iterator[Table]:
    pairs = [(n, i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) if n and i != j]
    table = Table(
        *("class", "taken for", "points", "of the class"),
        title=f"most frequent confusions, {reading}; --json has the whole matrix",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for n, i, j in sorted(pairs, key=lambda pair: (-pair[0], pair[1:]))[:_MOST_NAMED]:
        share = f"{100 * n / sum(matrix[i]):.0f}%"
        table.add_row(Text(shorten(names[i])), Text(shorten(names[j])), str(n), share)
    yield table


def _spoken(reading: str) -> str:
    return reading.replace("held_out", "held-out").replace("_", " ")


def _whole_numbers(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",") if text):
        raise ConfigError(f"whole numbers with commas between are needed, not '{text}'")
    return [int(part) for part in text.split(",") if text]
