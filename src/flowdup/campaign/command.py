"""The command `flowdup reproduce`: options in, sentences out."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flowdup.campaign.reproduce import Request
from flowdup.campaign.reproduce import reproduce as run_request
from flowdup.interruption import Interruption

_DEFAULT = Request([])


def reproduce(
    context: typer.Context,
    tables: Annotated[
        list[str],
        typer.Argument(
            help="Tables in experiments/, TOML files, or 'all'; some rows: TABLE/ROW,ROW."
        ),
    ],
    jobs: Annotated[int, typer.Option(min=0, help="Runs at a time; 0: one per core.")] = 0,
    seconds: Annotated[
        float, typer.Option(min=0, help="Stop after this time; 0: when all is done.")
    ] = 0.0,
    seeds: Annotated[int, typer.Option(min=0, help="So many of the first seeds; 0: all.")] = 0,
    rows: Annotated[str, typer.Option(help="These rows alone, with commas between.")] = "",
    columns: Annotated[
        str, typer.Option(help="These columns alone, and the searches that choose for them.")
    ] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="engine.key=value, e.g. engine.device=cuda")
    ] = None,
    work: Annotated[Path, typer.Option(help="The folder for all runs.")] = _DEFAULT.work,
    records: Annotated[
        Path, typer.Option(help="What runs gave, a line each: read and written.")
    ] = _DEFAULT.records,
    merge: Annotated[
        list[Path] | None, typer.Option(help="Records from another machine to take in.")
    ] = None,
    results: Annotated[Path, typer.Option(help="The folder for TABLE.json.")] = _DEFAULT.results,
    dry_run: Annotated[bool, typer.Option(help="Say what is missing and run nothing.")] = False,
    run: Annotated[
        bool, typer.Option(help="--no-run: write what the records say, and run nothing.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Run what tables of the paper still need, and write them beside the paper's numbers.

    It can be stopped at any time: the same command goes on.
    """
    request = Request(
        tables,
        jobs,
        seconds,
        seeds,
        rows,
        columns,
        settings or [],
        work,
        records,
        merge or [],
        results,
        dry_run,
        run,
    )
    with Interruption() as stop:
        for event in run_request(request, stop, context.obj):
            print(json.dumps(event.data) if as_json else event.sentence, flush=True)
        if stop.signal:
            stop.end_program()
