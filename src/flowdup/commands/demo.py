"""The command `flowdup demo`: the comparison of the preset `demo`, and a figure of clients."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flowdup.commands.compare import compare
from flowdup.commands.options import JobCount, Json, Only, Settings
from flowdup.run import ComparisonFolder, embed_run

_DRAWN = "flowdup"  # the method whose embeddings of clients are drawn


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="The folder for all runs.")] = Path("runs/demo"),
    settings: Settings = None,
    only: Only = "*",
    jobs: JobCount = 0,
    as_json: Json = False,
) -> None:
    """Five methods on digits, three seeds: a table, a page and a figure, in minutes on a laptop.

    The digits come with scikit-learn, so that nothing is downloaded. Run again, it goes on where it
    was stopped.
    """
    console = Console(stderr=True)
    if not as_json:
        told = f"five methods on digits, three seeds, into {out}: some minutes on two cores"
        console.print(told, soft_wrap=True, markup=False, highlight=False)
    compare(context, "demo", out, settings, only, jobs, as_json)
    run = ComparisonFolder(out).run(_DRAWN, 0)
    if not run.started:
        return
    found = embed_run(run.path, group="test", settings=["data.classes_per_client=0"])
    if as_json:
        print(json.dumps(found))
        return
    files = " and ".join(found["files"])
    told = f"{files}: what FLowDUP knows of test clients, coloured by their rotation"
    Console().print(told, soft_wrap=True, markup=False, highlight=False)
