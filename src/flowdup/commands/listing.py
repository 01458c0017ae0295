"""The commands `flowdup settings` and `flowdup presets`: what can be set, and sets of settings."""

import itertools
import json
import re
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from flowdup.commands.completion import complete_key
from flowdup.commands.options import Json
from flowdup.config import preset_names, preset_text
from flowdup.setting_list import Setting, list_settings

_WIDEST = 40  # of a key and its default, in front of the meanings


def settings(
    prefix: Annotated[
        str,
        typer.Argument(
            help="Only what is below, e.g. 'server' or 'method.subspace'.",
            autocompletion=complete_key,
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Every setting with its default and its meaning."""
    found = list_settings(prefix)
    if as_json:
        print(json.dumps([asdict(setting) for setting in found]))
        return
    width = min(_WIDEST, max(len(_assignment(setting)) for setting in found))
    console = Console()
    for setting in found:
        of = f" [{', '.join(setting.methods)}]" if setting.methods else ""
        meaning = Text(f"  # {setting.meaning}{of}", "dim")
        console.print(Text(f"{_assignment(setting):{width}}") + meaning, soft_wrap=True)


def presets(
    as_json: Json = False,
) -> None:
    """What presets there are for `train` and `compare`."""
    found = {name: _first_sentence(preset_text(name)) for name in preset_names()}
    if as_json:
        print(json.dumps([{"name": name, "summary": text} for name, text in found.items()]))
        return
    width = max(map(len, found))
    for name, text in found.items():
        print(f"{name:{width}}  {text}")


def _assignment(setting: Setting) -> str:
    return f"{setting.key} = {setting.default}"


def _first_sentence(text: str) -> str:
    """Of the comment at the top of a TOML file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.split("\n"))
    comment = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=[.])\s", comment, maxsplit=1)[0]
