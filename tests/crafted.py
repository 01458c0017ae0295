"""Checkpoints and models as somebody writes them who can compute a SHA-256, too."""

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

Change = Callable[[dict[str, Any]], None]


def seal(header: dict[str, Any]) -> bytes:
    """The text of checkpoint.json with a right seal; what is nested too deep has none."""
    text = json.dumps({n: v for n, v in header.items() if n != "sha256"}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    table = {n: v for n, v in header.items() if n != "sha256"} | {"sha256": digest}
    return json.dumps(table, indent=2).encode()


def change_header(folder: Path, change: Change) -> None:
    """Change checkpoint.json and seal it anew."""
    path = folder / "checkpoint.json"
    header = copy.deepcopy(json.loads(path.read_bytes()))
    change(header)
    path.write_bytes(seal(header))


def write_tensors(folder: Path, content: bytes) -> None:
    """Replace a checkpoint's tensors, with a right digest."""
    header = json.loads((folder / "checkpoint.json").read_bytes())
    (folder / header["tensors"]["file"]).write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    change_header(folder, lambda h: h["tensors"].update(sha256=sha256))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    header = json.loads((folder / "checkpoint.json").read_bytes())
    tensors = load_file(folder / header["tensors"]["file"])
    change(tensors)
    write_tensors(folder, save(tensors))


def write_model(path: Path, about: str, weights: dict[str, Tensor]) -> None:
    """A personal model's file with a right digest."""
    from flowdup.personal_model import weights_digest  # noqa: PLC0415

    path.write_bytes(save(weights, {"flowdup": about, "sha256": weights_digest(about, weights)}))


def table_of(content: bytes) -> dict[str, Any]:
    """The table of tensors at the beginning of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    found: dict[str, Any] = json.loads(content[8 : 8 + length])
    return found


def with_table(content: bytes, table: dict[str, Any]) -> bytes:
    """The same file with another table in front of its numbers."""
    length = int.from_bytes(content[:8], "little")
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]
