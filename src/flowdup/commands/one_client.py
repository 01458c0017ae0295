"""The client whose rows of a table a command reads, and a warning where it reads all clients'."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from flowdup.data.table_inputs import clients_named_in
from flowdup.errors import ConfigError, shorten

Client = Annotated[
    str, typer.Option(help="Of a table with rows of several clients: those of this one alone.")
]


def check_client(source: Path, client: str, column: str, otherwise: str) -> None:
    """Refuse a client that is not there; warn of what happens `otherwise`, if none is chosen and
    there are rows of several.
    """
    named = clients_named_in(source, column)
    if client and client not in named:
        raise ConfigError(
            f"{source} has no row whose column '{column}' is '{shorten(client)}': check the name"
        )
    if len(named) > 1 and not client:
        warn(
            f"{source} has rows of {len(named)} clients, and {otherwise}: choose one with --client"
        )


def warn(sentence: str) -> None:
    """A line on stderr."""
    told = Text.assemble(("warning:", "bold yellow"), f" {sentence}")
    Console(stderr=True).print(told, soft_wrap=True, highlight=False)
