"""Checkpoints: safetensors and JSON, written atomically, opened only if every byte is right.

A checkpoint folder holds `checkpoint.json` and the tensor file that it names.  The JSON is
replaced last, so a process killed at any moment leaves the old pair or the new one.  P is not in
it, nor theta_0 where the seed gives it: the seed, the shapes and a SHA-256 of what they must give
are, and loading compares.  A theta_0 that an earlier stage learned is.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors

from flowdup.errors import CheckpointError, ConfigError, DataError, TrainingError, shorten
from flowdup.federation_spec import FederationSpec, read_federation
from flowdup.files import write_atomic
from flowdup.methods import Method
from flowdup.optimizers import MOMENTS, Optimizer
from flowdup.params import Params
from flowdup.privacy import Draw, PrivateRounds
from flowdup.server import BestRound, ServerConfig, ServerState
from flowdup.stored_tensors import TensorInfo, all_finite, load_tensors, open_tensors
from flowdup.strict_json import (
    get_count,
    get_counts,
    get_number,
    get_object,
    get_text,
    seal,
    unseal,
)

FORMAT = 4
CHECKPOINT = "checkpoint"  # the name of the folder inside a run folder
BEST = "best"  # and of the one with the round to keep, where it is not the last
_GROUPS = ("psi", "server", "method", "average", "correction", "start")  # of tensors
_HEADER = "checkpoint.json"
_MOST_HEADER = 2**26  # bytes
_TENSORS = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors")  # no other folder's file
_REMEDY = "restore the folder from a copy, or train again"


@dataclass(frozen=True)
class RunOrigin:
    """What a run was started with, sealed with each of its checkpoints."""

    config: dict[str, Any]  # every setting, as a table
    clients_sha256: str  # of clients.json, which has a digest of every client's data


def has_checkpoint(folder: Path) -> bool:
    """Whether the folder holds a checkpoint, right or damaged."""
    return (folder / _HEADER).exists()


def checkpoint_in(folder: Path) -> Path:
    """The folder inside a run folder with the round to keep, or the folder itself if it is one."""
    if has_checkpoint(folder / BEST):
        return folder / BEST
    inside = folder / CHECKPOINT
    return inside if inside.is_dir() else folder


def save_checkpoint(
    folder: Path, spec: FederationSpec, state: ServerState, origin: RunOrigin | None = None
) -> None:
    """Replace the folder's checkpoint as a whole; TrainingError if psi is no longer finite."""
    if not all(map(all_finite, (state.psi, state.optimizer, state.average, state.correction))):
        raise TrainingError(
            f"training diverged by round {state.round}, which is not saved: lower "
            "client.optimizer.lr or server.optimizer.lr"
        )
    groups = {
        "psi": state.psi,
        "server": state.optimizer,
        "method": state.method_state,
        "average": state.average,
        "correction": state.correction,
        "start": state.start,
    }
    tensors = {f"{g}/{n}": t.cpu().clone() for g, ts in groups.items() for n, t in ts.items()}
    content = save_tensors(tensors)
    sha256 = hashlib.sha256(content).hexdigest()
    name = f"round-{state.round}-{sha256[:8]}.safetensors"
    header = {
        "format": FORMAT,
        "round": state.round,
        "stage": {"number": state.stage, "began": state.began},
        "best": _best_table(state.best) if state.best else None,
        "released": [_released_table(rounds) for rounds in state.released],
        "federation": asdict(spec),
        "tensors": {"file": name, "sha256": sha256},
        "run": asdict(origin) if origin else None,
    }
    write_atomic(folder / name, content)
    write_atomic(folder / _HEADER, seal(header))
    _remove_tensors_but(folder, name)


def remove_old_tensors(folder: Path) -> None:
    """Delete tensor files that the header does not name, which a killed writer left."""
    _, name, _ = _read_place(_read_header(folder / _HEADER))
    _remove_tensors_but(folder, name)


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, its header first, and its folder if nothing else is in there."""
    (folder / _HEADER).unlink(missing_ok=True)
    _remove_tensors_but(folder, "")
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _remove_tensors_but(folder: Path, name: str) -> None:
    for path in folder.glob("round-*.safetensors"):
        if path.name != name:
            path.unlink(missing_ok=True)


def load_checkpoint(folder: Path) -> tuple[FederationSpec, ServerState]:
    """What a checkpoint describes and holds, in itself consistent and finite.

    Whether the method here is the one described is for `FederationSpec.check` to say, and whether
    the state fits it for `check_state`.
    """
    for attempt in range(3):  # a run that goes on may replace the file between two readings
        header = _read_header(folder / _HEADER)
        described = folder / _HEADER
        try:
            number, name, sha256 = _read_place(header)
            spec = read_federation(get_object(header, "federation"))
            described = folder / name
            state = _read_state(described, sha256, spec, number)
            return spec, replace(state, **_read_progress(header, number, bool(state.start)))
        except OSError as error:
            if attempt == 2:
                raise CheckpointError(
                    f"cannot read {described}: {error.strerror}; {_REMEDY}"
                ) from None
        except (ValueError, ConfigError, DataError) as error:
            raise CheckpointError(f"{described} is no checkpoint ({error}): {_REMEDY}") from None
    raise AssertionError("the last attempt returns or raises")


def check_state(state: ServerState, method: Method, config: ServerConfig) -> None:
    """Refuse what the server cannot go on from: another optimiser's state or method's."""
    at_start = method.server_state()
    here = Optimizer(config.optimizer).names(state.psi)
    mine, stored = (
        {n: s.shape for n, s in tensors.items()} for tensors in (at_start, state.method_state)
    )
    averages = bool(state.average) == bool(config.averaging)
    corrects = method.is_corrected or not state.correction
    if mine != stored or {*state.optimizer} != here or not averages or not corrects:
        raise CheckpointError(
            "the checkpoint holds the state of another server optimizer or method than the "
            f"settings name: {_REMEDY}"
        )
    # a method may start with NaN or infinity for what it does not know yet
    wrong = [~state.method_state[n].isfinite() & s.isfinite().cpu() for n, s in at_start.items()]
    if any(bool(found.any()) for found in wrong):
        raise CheckpointError(f"the checkpoint holds NaN or infinite numbers: {_REMEDY}")


def _read_place(header: dict[str, Any]) -> tuple[int, str, str]:
    """The round, and name and SHA-256 of the file with the tensors."""
    tensors = get_object(header, "tensors")
    name = get_text(tensors, "file")
    if not _TENSORS.fullmatch(name):
        raise ValueError(f"'{shorten(name)}' cannot be the name of its tensors")
    return get_count(header, "round"), name, get_text(tensors, "sha256")


def _read_progress(header: dict[str, Any], round: int, has_start: bool) -> dict[str, Any]:
    """Which stage a state is of, and its best round so far: its start, too, if it is a model."""
    stage = get_object(header, "stage")
    began, best = get_count(stage, "began"), None
    if header.get("best") is not None:
        table = get_object(header, "best")
        best = BestRound(
            get_count(table, "round"),
            get_number(table, "accuracy"),
            get_count(table, "misses"),
            get_number(table, "loss") if "loss" in table else math.inf,
        )
    first = began if has_start else began + 1
    if began > round or (best and not first <= best.round <= round):
        raise ValueError("its stage or best round comes after its round")
    return {
        "stage": get_count(stage, "number"),
        "began": began,
        "best": best,
        "released": _read_released(header),
    }


def _best_table(best: BestRound) -> dict[str, Any]:
    """Without a loss that nobody told, which JSON cannot say."""
    return {key: value for key, value in asdict(best).items() if value != math.inf}


def _released_table(rounds: PrivateRounds) -> dict[str, Any]:
    drawn, of = zip(*rounds.parts, strict=True)
    return {"noise": rounds.noise, "rounds": rounds.rounds, "drawn": drawn, "of": of}


def _read_released(header: dict[str, Any]) -> tuple[PrivateRounds, ...]:
    """The draws of rounds with noise, which older checkpoints do not have."""
    tables, found = header.get("released", []), []
    if type(tables) is not list or any(type(table) is not dict for table in tables):
        raise ValueError("its list of rounds with noise is none")
    for table in tables:
        parts = zip(get_counts(table, "drawn"), get_counts(table, "of"), strict=True)
        noise, rounds = get_number(table, "noise"), get_count(table, "rounds")
        found.append(PrivateRounds(noise, tuple(Draw(*part) for part in parts), rounds))
        if noise <= 0 or any(drawn > of for drawn, of in found[-1].parts):
            raise ValueError("its cohorts were drawn of fewer clients than they have")
    return tuple(found)


def read_origin(folder: Path) -> RunOrigin | None:
    """What the checkpoint's run was started with; None if it was saved outside of a run."""
    header = _read_header(folder / _HEADER)
    if header.get("run") is None:
        return None
    try:
        table = get_object(header, "run")
        return RunOrigin(get_object(table, "config"), get_text(table, "clients_sha256"))
    except ValueError as error:
        raise CheckpointError(f"{folder / _HEADER} is not of a run ({error}): {_REMEDY}") from None


def _read_state(path: Path, sha256: str, spec: FederationSpec, number: int) -> ServerState:
    with open_tensors(path) as file:
        _check_tensors(file.tensors, spec)
        content = file.read()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError("it is truncated or was changed")
    groups: dict[str, Params] = {name: {} for name in _GROUPS}
    for name, tensor in load_tensors(content).items():
        group, _, rest = name.partition("/")
        groups[group][rest] = tensor
    psi, server = groups["psi"], groups["server"]
    squares = [t for n, t in server.items() if n == "steps" or n.startswith("square/")]
    finite = all(all_finite(tensors) for name, tensors in groups.items() if name != "method")
    if not finite or any(bool((t < 0).any()) for t in squares):
        raise ValueError("it holds NaN, infinite or impossible numbers")
    return ServerState(
        number,
        psi,
        server,
        groups["method"],
        groups["average"],
        groups["correction"],
        start=groups["start"],
    )


def _check_tensors(stored: Mapping[str, TensorInfo], spec: FederationSpec) -> None:
    """Refuse names, types and shapes other than those described, before a value is read."""
    psi = {n: tuple(s) for n, s in spec.shapes.items() if n.startswith("psi/")}
    own = {n: tuple(s) for n, s in spec.shapes.items() if n.startswith("method/")}
    theta = {n: tuple(s) for n, s in spec.shapes.items() if n.startswith("theta/")}
    correction: dict[str, tuple[int, ...]] = {"bias": (spec.inputs.classes,)}
    correction |= dict.fromkeys(("move", "scale", "sparsity", "strength"), ())
    if "correction/profile" in stored:  # up to 0.2.0 there was none
        correction |= {"profile": (spec.inputs.classes,), "typical": ()}
    optional = {  # groups that are there as a whole or not at all
        "average": {n.replace("psi/", "average/", 1): s for n, s in psi.items()},
        "correction": {f"correction/{n}": s for n, s in correction.items()},
        "start": {n.replace("theta/", "start/", 1): s for n, s in theta.items()},
    }
    there = {name.partition("/")[0] for name in stored}
    whole = psi | own
    for group, shapes in optional.items():
        whole |= shapes if group in there else {}
    for name, info in stored.items():
        described = whole.get(name, _server_shape(name, psi))
        if described != info.shape or info.dtype not in ("F32", "F64"):
            raise ValueError(f"its '{shorten(name)}' is {info.dtype} {shorten(list(info.shape))}")
    kinds = {name.split("/")[1] for name in stored if name.startswith("server/")} - {"steps"}
    moments = {f"server/{kind}/{n.removeprefix('psi/')}" for kind in kinds for n in psi}
    if missing := (whole.keys() | moments) - stored.keys():
        raise ValueError(f"it has no '{shorten(min(missing))}'")


def _server_shape(name: str, psi: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of a tensor of some optimiser's state; None if no optimiser has it."""
    if name == "server/steps":
        return ()
    group, _, rest = name.partition("/")
    kind, _, parameter = rest.partition("/")
    known = group == "server" and any(kind in kinds for kinds in MOMENTS.values())
    return psi.get(f"psi/{parameter}") if known else None


def _read_header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint in {path.parent}: train first")
    try:
        if path.stat().st_size > _MOST_HEADER:
            raise ValueError("it is too long")
        header = unseal(path.read_bytes())
    except (OSError, ValueError):
        raise CheckpointError(f"{path} is truncated or was changed: {_REMEDY}") from None
    version = header.get("format")
    if type(version) is not int or version != FORMAT:
        raise CheckpointError(
            f"{path} has format {shorten(version)}, this flowdup {FORMAT}: use the version that "
            "wrote it"
        )
    return header
