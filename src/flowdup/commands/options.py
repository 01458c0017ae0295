"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from flowdup.commands.completion import complete_setting

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Inputs = Annotated[
    Path,
    typer.Option(
        "--input",
        help="Inputs: .npz, .npy, .csv, .parquet, an image, a folder or a .tar of images.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value, e.g. server.rounds=10", autocompletion=complete_setting),
]
Only = Annotated[str, typer.Option(help="Run variants whose names fit, e.g. 'fed*'.")]
JobCount = Annotated[int, typer.Option(min=0, help="Runs at a time; 0: one per core.")]
