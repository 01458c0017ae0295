"""Checkpoints: safetensors and JSON, written atomically, opened only if every byte is right.

A checkpoint folder holds `checkpoint.json` and the tensor file that it names.  The JSON is
replaced last, so a process killed at any moment leaves the old pair or the new one.  theta_0 and P
are not in it: the seed and a SHA-256 of what the seed must give are, and loading compares.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from flowdup.data.clients import InputSpec
from flowdup.errors import CheckpointError, TrainingError
from flowdup.files import write_atomic
from flowdup.server import ServerState

FORMAT = 1
_HEADER = "checkpoint.json"


@dataclass(frozen=True)
class FederationSpec:
    """What makes a federation, apart from what it learns."""

    seed: int
    model: str
    method: dict[str, Any]  # as in the configuration
    inputs: InputSpec
    expansion_sha256: str  # the method's fingerprint


def save_checkpoint(folder: Path, federation: FederationSpec, state: ServerState) -> None:
    if not all(bool(torch.isfinite(p).all()) for p in state.psi.values()):
        raise TrainingError(
            f"training diverged by round {state.round}: lower client.optimizer.lr or "
            "server.optimizer.lr; the checkpoint before is intact"
        )
    groups = {"psi": state.psi, "server": state.optimizer}
    tensors = {f"{g}/{n}": t.cpu().contiguous() for g, ts in groups.items() for n, t in ts.items()}
    content = save_tensors(tensors)
    name = f"round-{state.round:08d}.safetensors"
    header = {
        "format": FORMAT,
        "round": state.round,
        "federation": asdict(federation),
        "tensors": {"file": name, "sha256": hashlib.sha256(content).hexdigest()},
    }
    header["sha256"] = _digest(header)
    write_atomic(folder / name, content)
    write_atomic(folder / _HEADER, json.dumps(header, indent=2).encode())
    for old in folder.glob("round-*.safetensors"):
        if old.name != name:
            old.unlink()


def load_checkpoint(folder: Path) -> tuple[FederationSpec, ServerState]:
    header = _read_header(folder / _HEADER)
    path = folder / header["tensors"]["file"]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; {_REMEDY}") from None
    if hashlib.sha256(content).hexdigest() != header["tensors"]["sha256"]:
        raise CheckpointError(f"{path} is truncated or was changed: {_REMEDY}")
    try:
        tensors = load_tensors(content)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a tensor file ({error}): {_REMEDY}") from None
    groups: dict[str, dict[str, torch.Tensor]] = {"psi": {}, "server": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        groups[group][rest] = tensor
    table = header["federation"]
    federation = FederationSpec(**table | {"inputs": read_spec(table["inputs"])})
    return federation, ServerState(header["round"], groups["psi"], groups["server"])


def read_spec(table: dict[str, Any]) -> InputSpec:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    return InputSpec(**values)


_REMEDY = "restore the folder from a copy, or train again"


def _read_header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint in {path.parent}: train first")
    try:
        header: dict[str, Any] = json.loads(path.read_bytes())
        told, version = header.pop("sha256"), header["format"]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{path} is truncated or was changed: {_REMEDY}") from None
    if _digest(header) != told:
        raise CheckpointError(f"{path} is truncated or was changed: {_REMEDY}")
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, this flowdup {FORMAT}: use the version that wrote it"
        )
    return header


def _digest(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
