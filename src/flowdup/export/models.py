"""A client's own model as an ordinary file that others can run: ONNX, or `torch.export`."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import torch

from flowdup.errors import ConfigError
from flowdup.export.onnx_files import example_inputs, onnx_bytes
from flowdup.files import write_atomic
from flowdup.personalize import PersonalModel
from flowdup.version import __version__


def export_model(model: PersonalModel, path: Path, format: str = "") -> None:
    """Write the model to a file of one of the `FORMATS`, if none is given of that of its ending.

    All but safetensors know nothing of flowdup: inputs as stored [n, *shape] in, logits out, for
    any n; class names are in ONNX's metadata.
    """
    format = format or _ENDINGS.get(path.suffix.lower(), FORMATS[0])
    if format == "safetensors":
        model.save(path)
    elif format in _WRITERS:
        write_atomic(path, _WRITERS[format](model))
    else:
        raise ConfigError(f"unknown format '{format}': use one of {', '.join(FORMATS)}")


def _onnx(model: PersonalModel) -> bytes:
    about = {"class_names": json.dumps(model.class_names), "flowdup": __version__}
    return onnx_bytes(model, [example_inputs(model.inputs)], ["x"], ["logits"], about)


def _torch(model: PersonalModel) -> bytes:
    batch = torch.export.Dim("n", min=1)
    program = torch.export.export(
        model, (example_inputs(model.inputs),), dynamic_shapes=({0: batch},)
    )
    file = io.BytesIO()
    names = {"class_names.json": json.dumps(model.class_names)}
    torch.export.save(program, file, extra_files=names)
    return file.getvalue()


_WRITERS: dict[str, Callable[[PersonalModel], bytes]] = {"onnx": _onnx, "torch": _torch}
_ENDINGS = {".onnx": "onnx", ".pt2": "torch"}
FORMATS = ("safetensors", *_WRITERS)
