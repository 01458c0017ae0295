"""The command `flowdup doctor`: what a run suffers from, and what to try."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from flowdup.commands.options import Json
from flowdup.progress import Preparing
from flowdup.run.diagnosis import diagnose_run


def doctor(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: Json = False,
) -> None:
    """Say what a run suffers from, with the numbers that show it, and what to try."""
    with Preparing(quiet=as_json):
        found = diagnose_run(folder)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    console = Console()
    for finding in found.findings:
        told = Text.assemble((f"{finding.name}: ", "bold"), finding.text)
        console.print(told, soft_wrap=True)
        console.print(Text(f"  try: {finding.remedy}"), soft_wrap=True)
    if not found.findings:
        console.print("nothing known is wrong with this run")
    for text in found.unknown:
        console.print(Text(f"not known: {text}", "dim"), soft_wrap=True)
