"""The command `flowdup init`: look at a user's clients and write settings that fit them."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flowdup.commands.init_choice import Choice
from flowdup.commands.options import Json
from flowdup.config import load_config, override, read_config
from flowdup.data import load_population
from flowdup.data.inspection import READING, Inspection, inspect_clients
from flowdup.errors import ConfigError, DataError, printable
from flowdup.files import write_atomic
from flowdup.progress import Preparing
from flowdup.random import Stream
from flowdup.run.simulation import Simulation
from flowdup.settings import Table

_SHOWN = 12  # names of columns


def init(
    source: Annotated[Path, typer.Argument(help="A folder or table of clients.")],
    out: Annotated[
        Path | None, typer.Option(help="The TOML file to write; FOLDER's name if not given.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="How to read a table or CSV files, e.g. data.label_column=diagnosis"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at your clients' data and write a TOML file with settings that fit."""
    reading = _reading(settings or [])
    file = out or Path(f"{source.absolute().stem}.toml")
    if file.suffix != ".toml":
        raise ConfigError(f"{file} would not be read as settings: give --out a name with .toml")
    if file.exists():
        raise ConfigError(f"{file} exists already: choose another with --out, or remove it")
    with Preparing(quiet=as_json):
        found = inspect_clients(source, reading)
    if not found.problems:
        choice = Choice.of(found)
        found = replace(found, remarks=[*found.remarks, *choice.remarks(found)])
        told = describe(found, choice.labels)
        write_atomic(file, choice.toml(found, told).encode())
        _check(file)
    else:
        told = describe(found)
    if as_json:
        print(json.dumps(asdict(found) | {"file": None if found.problems else str(file)}))
    else:
        _show(found, told, file)
    if found.problems:
        raise DataError(
            f"{source} cannot be trained on, for the reasons above: mend them and run this again"
        )


def _reading(settings: Sequence[str]) -> Table:
    """The settings of `data` that say how clients are read; ConfigError for any other."""
    table = override({}, *settings)
    read_config(table)  # refuses what is no setting
    data: Table = table.get("data", {})
    wrong = [key for key in table if key != "data"]
    wrong += [f"data.{key}" for key in data if key not in READING]
    if wrong:
        raise ConfigError(
            f"'{wrong[0]}' cannot be set here, as {', '.join(f'data.{key}' for key in READING)} "
            "can: change it in the file that is written"
        )
    return data


def describe(found: Inspection, labels: str = "") -> list[str]:
    """One line per fact, then those that are odd; all can be printed."""
    groups = "" if "all" in found.groups else f" ({_counts(found.groups)})"
    points = {name: f"{number:g}" for name, number in found.points.items()}
    names = found.class_names or tuple(map(str, range(len(found.class_points))))
    share = sorted(zip(found.class_points, names, strict=True), reverse=True)
    whole = sum(found.class_points) or 1
    shown = ", ".join(
        f"{json.dumps(name, ensure_ascii=False)} {100 * n / whole:.0f}%" for n, name in share[:10]
    )
    lines = [
        f"{found.clients} clients{groups}, {found.labeled} with labels; "
        f"points per client: {_counts(points)}",
        *([labels] if labels else []),
        f"inputs: {found.dtype} {list(found.shape)}{_columns(found.columns)}",
        f"{len(found.class_points)} classes, {found.classes_per_client:g} at a typical client: "
        f"{shown}{' and others' if len(share) > 10 else ''}",
        *(f"note: {text}" for text in found.remarks),
    ]
    return [printable(line) for line in lines]


def _columns(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f", the columns {', '.join(names[:_SHOWN])}{more}" if names else ""


def _counts(table: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in table.items())


def _check(file: Path) -> None:
    """Load the clients and build all stages; what is refused leaves no file behind."""
    try:
        config = load_config(str(file))
        population = load_population(config.data, Stream(config.seed).child("data"))
        Simulation(config, population, stage=0).check_later_stages(config)
    except BaseException:
        file.unlink()
        raise


def _show(found: Inspection, told: list[str], file: Path) -> None:
    console = Console()
    lines = told + [f"must be mended: {text}" for text in found.problems]
    if not found.problems:
        words = ("flowdup", "train", str(file), "--out", f"runs/{file.stem}")
        lines.append(f"{file} is written: {shlex.join(words)}")
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)
