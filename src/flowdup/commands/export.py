"""`flowdup export`: a bundle that makes personal models outside Python."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flowdup.commands.options import Json
from flowdup.data import ClientData, load_population
from flowdup.errors import ConfigError, DataError
from flowdup.export import export_bundle
from flowdup.personalize import load
from flowdup.random import Stream
from flowdup.run import RunFolder
from flowdup.run.evaluated_clients import ChosenClients
from flowdup.run.origin import stored_config


def export(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Option(help="The folder of the bundle.")],
    format: Annotated[str, typer.Option(help="onnx, so far the only one.")] = "onnx",
    samples: Annotated[
        int, typer.Option(min=0, help="Test clients whose images and labels go along.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Write what a browser needs to make any client's model: networks as ONNX, and a manifest."""
    if format != "onnx":
        raise ConfigError(f"a bundle is of format 'onnx', not '{format}'")
    manifest = export_bundle(load(folder), out, _test_clients(folder, samples))
    size = sum((out / name).stat().st_size for name in manifest["files"])
    told = f"{out}: {', '.join(manifest['files'])} and manifest.json, {size / 1e6:.1f} MB"
    print(json.dumps({"bundle": str(out), "bytes": size, **manifest}) if as_json else told)


def _test_clients(folder: Path, count: int) -> list[ClientData]:
    """The first of a run's test clients."""
    if not count:
        return []
    config = stored_config(RunFolder(folder))
    population = load_population(config.data, Stream(config.seed).child("data"))
    clients = ChosenClients("test").among(population)
    if count > len(clients):
        raise DataError(
            f"the run has {len(clients)} test clients, too few for {count} samples: ask for fewer"
        )
    return list(clients[:count])
