"""`flowdup export`: a bundle that makes personal models outside Python."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flowdup.commands.options import Json
from flowdup.errors import ConfigError
from flowdup.export import export_bundle
from flowdup.personalize import load


def export(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Option(help="The folder of the bundle.")],
    format: Annotated[str, typer.Option(help="onnx, so far the only one.")] = "onnx",
    as_json: Json = False,
) -> None:
    """Write what a browser needs to make any client's model: networks as ONNX, and a manifest."""
    if format != "onnx":
        raise ConfigError(f"a bundle is of format 'onnx', not '{format}'")
    manifest = export_bundle(load(folder), out)
    size = sum((out / name).stat().st_size for name in manifest["files"])
    told = f"{out}: {', '.join(manifest['files'])} and manifest.json, {size / 1e6:.1f} MB"
    print(json.dumps({"bundle": str(out), "bytes": size, **manifest}) if as_json else told)
