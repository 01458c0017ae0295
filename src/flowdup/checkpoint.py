"""Checkpoints: safetensors and JSON, written atomically, opened only if every byte is right.

A checkpoint folder holds `checkpoint.json` and the tensor file that it names.  The JSON is
replaced last, so a process killed at any moment leaves the old pair or the new one.  theta_0 and P
are not in it: the seed, the shapes and a SHA-256 of what the seed must give are, and loading
compares.
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
from flowdup.methods import Method, MethodConfig
from flowdup.random import ZeroStream
from flowdup.server import ServerState

FORMAT = 3
CHECKPOINT = "checkpoint"  # the name of the folder inside a run folder
_HEADER = "checkpoint.json"
_REMEDY = "restore the folder from a copy, or train again"


@dataclass(frozen=True)
class FederationSpec:
    """What makes a federation, apart from what it learns."""

    seed: int
    model: str
    method: dict[str, Any]  # as in the configuration
    inputs: InputSpec
    expansion_sha256: str  # the method's fingerprint
    shapes: dict[str, list[int]]  # of psi, and of theta

    @classmethod
    def of(
        cls, seed: int, model: str, table: dict[str, Any], inputs: InputSpec, method: Method
    ) -> "FederationSpec":
        return cls(seed, model, table, inputs, method.fingerprint, _shapes(method))

    @property
    def psi_names(self) -> list[str]:
        """In the order in which the method's `init` gives them, of a federation made here."""
        return [n.removeprefix("psi/") for n in self.shapes if n.startswith("psi/")]

    def check(self, method: Method) -> None:
        """Refuse a method that is made differently here."""
        if self.shapes != _shapes(method):
            raise CheckpointError(
                "the model is defined otherwise here than where this federation was trained: use "
                "the definition of that time"
            )
        if method.fingerprint != self.expansion_sha256:
            raise CheckpointError(
                "the seed gives another expansion here than where this federation was trained: use "
                "the same version of flowdup and of the model's definition"
            )


@dataclass(frozen=True)
class RunOrigin:
    """What a run was started with, sealed with each of its checkpoints."""

    config: dict[str, Any]  # every setting, as a table
    clients_sha256: str  # of clients.json, which has a digest of every client's data


def has_checkpoint(folder: Path) -> bool:
    return (folder / _HEADER).exists()


def checkpoint_in(folder: Path) -> Path:
    """The checkpoint folder inside a run folder, or the folder itself if it is one."""
    inside = folder / CHECKPOINT
    return inside if inside.is_dir() else folder


def save_checkpoint(
    folder: Path, spec: FederationSpec, state: ServerState, origin: RunOrigin | None = None
) -> None:
    if not all(bool(torch.isfinite(p).all()) for p in state.psi.values()):
        raise TrainingError(
            f"training diverged by round {state.round}: lower client.optimizer.lr or "
            "server.optimizer.lr; the checkpoint before is intact"
        )
    groups = {"psi": state.psi, "server": state.optimizer, "method": state.method_state}
    tensors = {f"{g}/{n}": t.cpu().clone() for g, ts in groups.items() for n, t in ts.items()}
    content = save_tensors(tensors)
    sha256 = hashlib.sha256(content).hexdigest()
    name = f"round-{state.round}-{sha256[:8]}.safetensors"
    header = {
        "format": FORMAT,
        "round": state.round,
        "federation": asdict(spec),
        "tensors": {"file": name, "sha256": sha256},
        "run": asdict(origin) if origin else None,
    }
    write_atomic(folder / name, content)
    write_atomic(folder / _HEADER, _sealed(header))
    _remove_tensors_but(folder, name)


def remove_old_tensors(folder: Path) -> None:
    """Delete tensor files that the header does not name, which a killed writer left."""
    _remove_tensors_but(folder, _read_header(folder / _HEADER)["tensors"]["file"])


def _remove_tensors_but(folder: Path, name: str) -> None:
    for path in folder.glob("round-*.safetensors"):
        if path.name != name:
            path.unlink(missing_ok=True)


def load_checkpoint(folder: Path) -> tuple[FederationSpec, ServerState]:
    for attempt in range(3):  # a run that goes on may replace the file between two readings
        header = _read_header(folder / _HEADER)
        path = folder / header["tensors"]["file"]
        try:
            content = path.read_bytes()
            break
        except OSError as error:
            if attempt == 2:
                raise CheckpointError(f"cannot read {path}: {error.strerror}; {_REMEDY}") from None
    if hashlib.sha256(content).hexdigest() != header["tensors"]["sha256"]:
        raise CheckpointError(f"{path} is truncated or was changed: {_REMEDY}")
    try:
        tensors = load_tensors(content)
        groups: dict[str, dict[str, torch.Tensor]] = {"psi": {}, "server": {}, "method": {}}
        for name, tensor in tensors.items():
            group, _, rest = name.partition("/")
            groups[group][rest] = tensor
        table = header["federation"]
        method = MethodConfig.from_table(table["method"]).table()  # with settings newer than it
        spec = FederationSpec(**table | {"inputs": read_spec(table["inputs"]), "method": method})
    except (SafetensorError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint ({error}): {_REMEDY}") from None
    return spec, ServerState(header["round"], groups["psi"], groups["server"], groups["method"])


def read_origin(folder: Path) -> RunOrigin | None:
    """What the checkpoint's run was started with; None if it was saved outside of a run."""
    table = _read_header(folder / _HEADER).get("run")
    if table is None:
        return None
    try:
        origin = RunOrigin(**table)
    except TypeError:
        raise CheckpointError(f"{folder / _HEADER} is not of a run: {_REMEDY}") from None
    return origin


def read_spec(table: dict[str, Any]) -> InputSpec:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    return InputSpec(**values)


def _shapes(method: Method) -> dict[str, list[int]]:
    psi = method.init(ZeroStream(0))
    return {f"psi/{n}": list(p.shape) for n, p in psi.items()} | {
        f"theta/{n}": list(shape) for n, shape in method.f.shapes.items()
    }


def _sealed(header: dict[str, Any]) -> bytes:
    """The header's text with a SHA-256 of itself in it."""
    text = json.dumps(header, sort_keys=True)
    seal = {"sha256": hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(header | seal, indent=2).encode()


def _read_header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint in {path.parent}: train first")
    try:
        content = path.read_bytes()
        header: dict[str, Any] = json.loads(content)
        version = header["format"]
        del header["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is truncated or was changed: {_REMEDY}") from None
    if _sealed(header) != content:
        raise CheckpointError(f"{path} is truncated or was changed: {_REMEDY}")
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, this flowdup {FORMAT}: use the version that wrote it"
        )
    return header
