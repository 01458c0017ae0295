"""The command `flowdup personalize`: a client's own model, unless its data look foreign."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flowdup.checkpoint import checkpoint_in, read_origin
from flowdup.commands.one_client import Client, check_client, warn
from flowdup.commands.options import Inputs, Json
from flowdup.data import DataConfig
from flowdup.data.user_data import read_inputs
from flowdup.errors import ConfigError, ForeignClientError
from flowdup.export import FORMATS, export_model
from flowdup.familiarity import Verdict
from flowdup.personalize import Federation, load

CHOICES = ("warn", "global", "refuse")  # of what a foreign client gets


def personalize(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    source: Inputs,
    out: Annotated[Path, typer.Option(help="The model file to write.")],
    format: Annotated[
        str,
        typer.Option(
            help=f"Of the file: {', '.join(FORMATS)}. If not given, by the ending: .onnx, "
            f".pt2 (torch), any other {FORMATS[0]}."
        ),
    ] = "",
    client: Client = "",
    foreign: Annotated[
        str,
        typer.Option(
            help="If the data look like no training client's: warn, write the global model, "
            "or refuse."
        ),
    ] = CHOICES[0],
    as_json: Json = False,
) -> None:
    """Make one client's own model from its unlabeled data.

    A score says how far the data lie from those of training clients; above the threshold they are
    foreign, and no accuracy that was measured speaks of such a client.
    """
    if foreign not in CHOICES:
        raise ConfigError(f"--foreign is {', '.join(CHOICES)}, not '{foreign}'")
    if out.exists() and source.exists() and out.samefile(source):
        raise ConfigError(f"{out} has the client's data: give --out another name")
    federation = load(folder)
    inputs = federation.spec.inputs
    column = _client_column(folder)
    check_client(source, client, column, "one model is made of all of them")
    x = read_inputs(source, inputs.shape, inputs.columns, client, column)
    verdict = federation.familiarity(x) if federation.summary or foreign != "warn" else None
    is_foreign = verdict is not None and verdict.foreign
    if is_foreign and foreign == "refuse":
        assert verdict is not None
        raise ForeignClientError(f"{_foreign(verdict)}: check them, or choose --foreign global")
    is_global = is_foreign and foreign == "global"
    own = federation.global_model() if is_global else federation.personalize(x)
    own.client_column = column
    export_model(own, out, format)
    if is_foreign and not is_global:
        assert verdict is not None
        warn(f"{_foreign(verdict)}: check them, or take the global model by --foreign global")
    made = "global" if is_global else "personal"
    if as_json:
        found = asdict(verdict) if verdict else None
        if found and math.isinf(found["score"]):  # JSON has no word for it
            found["score"] = None
        print(json.dumps({"model": str(out), "points": len(x), "familiarity": found, "made": made}))
        return
    how = "the global model" if is_global else f"made from {len(x)} unlabeled points"
    Console().print(
        f"{out}: {how}; {_told(federation, verdict)}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


def _client_column(folder: Path) -> str:
    """The column that named clients in training; the usual one where nobody trained by a table."""
    origin = read_origin(checkpoint_in(folder))
    data = origin.config.get("data") if origin else None
    column = data.get("client_column") if isinstance(data, dict) else None
    return column if isinstance(column, str) else DataConfig().client_column


def _told(federation: Federation, verdict: Verdict | None) -> str:
    if verdict is None:
        able = federation.method.has_embedding
        why = "the run has stored nothing to tell by" if able else "its method cannot tell"
        return f"whether the data are like training clients' is not known: {why}"
    said = "foreign" if verdict.foreign else "like training clients'"
    return f"the data are {said}: {_numbers(verdict)}"


def _foreign(verdict: Verdict) -> str:
    return f"these data look like those of no training client ({_numbers(verdict)})"


def _numbers(verdict: Verdict) -> str:
    rate = f"{100 * verdict.rate:g} % false alarms"
    return f"score {verdict.score:.4g}, threshold {verdict.threshold:.4g} at {rate}"
