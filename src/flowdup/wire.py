"""Messages as bytes: tasks and replies serialized with safetensors and a strict JSON header.

Whoever reads bytes from elsewhere gets a message that fits psi and holds finite numbers, or a
MessageError in one sentence; nothing is parsed of a message above the size limit, and nothing is
unpickled.  A reply can be smaller than psi (`ENCODINGS`):

- `plain`: every number as it is.
- `factors`: a matrix as its rank-one pairs of vectors where these are fewer numbers.
- `bf16` and `int8`: the same, and all that has no factors in bfloat16, or in 8 bits with one scale
  per row.  What such rounding leaves out is not lost if the client adds it to its next reply
  (`reply_with_feedback`).
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from flowdup.errors import ConfigError, MessageError, shorten
from flowdup.messages import Reply, Schema, Task
from flowdup.params import Params, prefixed, strip_prefix
from flowdup.rank_one import Factors
from flowdup.stored_tensors import describe_tensors, load_tensors
from flowdup.strict_json import as_count, get_count, get_object, get_text, read_object

ENCODINGS = ("plain", "factors", "bf16", "int8")
_FORMAT = 1
_HEADER = "flowdup"  # the metadata key under which the JSON stands
_MOST_HEADER = 2**16  # bytes; and as many for the table of tensors, per 100 of them
_LEVELS = 127  # of int8, on either side of 0


def most_bytes(schema: Schema) -> int:
    """The size of the largest message about such a psi that an honest sender makes."""
    numbers = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in schema.values())
    return 2 * numbers + _MOST_HEADER * (1 + len(schema) // 100)


def task_to_bytes(task: Task) -> bytes:
    """A task as bytes."""
    cohort = {str(position): client for position, client in task.cohort.items()}
    tensors = prefixed("psi/", task.psi) | prefixed("broadcast/", task.broadcast)
    return _to_bytes("task", {"round": task.round, "cohort": cohort}, tensors)


def task_from_bytes(data: bytes, schema: Schema, limit: int) -> Task:
    """The task in these bytes; MessageError if it is none with such a psi, or longer than `limit`.

    Beware: what is broadcast besides psi is only known to be floating-point numbers.
    """
    try:
        header, tensors = _from_bytes(data, "task", {"round", "cohort"}, limit)
        cohort = get_object(header, "cohort")
        if any(not (p.isdecimal() and p.isascii() and len(p) < 19) for p in cohort):
            raise ValueError("its cohort has positions that are no numbers")
        members = {int(p): as_count(client, "cohort") for p, client in cohort.items()}
        if len(members) < len(cohort):
            raise ValueError("its cohort has a position twice")
        psi = _take(tensors, "psi/")
        broadcast = _take(tensors, "broadcast/")
        if broadcast.keys() & psi.keys():
            raise ValueError("it broadcasts a tensor with the name of one of psi")
        if odd := [n for n, t in broadcast.items() if not t.is_floating_point()]:
            raise ValueError(f"'{shorten(odd[0])}' is not of floating-point numbers")
        _check_empty(tensors)
        number = get_count(header, "round")
    except ValueError as error:
        raise _malformed(error) from None
    task = Task(number, psi, broadcast, members).check(schema)
    for name, tensor in psi.items():
        if not bool(torch.isfinite(tensor).all()):
            raise MessageError(f"a task has NaN or infinite numbers in '{name}': drop it")
    return replace(task, psi={n: psi[n] for n in schema})  # sums over psi hang on its order


def reply_to_bytes(reply: Reply, encoding: str = "factors") -> bytes:
    """A reply as bytes, in one of the `ENCODINGS`."""
    return _reply_to_bytes(_chosen(reply, encoding), encoding)[0]


def reply_with_feedback(reply: Reply, residual: Params, encoding: str) -> tuple[bytes, Params]:
    """A reply as bytes, and the residual: what rounding left out of all replies so far.

    Error feedback (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014).  The
    residual is the client's own: it begins empty, is given to the client's next reply, and is never
    sent.  It lives in the memory of the process that runs the client, who may store it between
    rounds; where it is lost, so is what it holds, at most one rounding error of one reply.
    """
    reply = _chosen(reply, encoding, residual)
    delta = {n: d + residual[n] if n in residual else d for n, d in reply.delta.items()}
    data, sent = _reply_to_bytes(replace(reply, delta=delta), encoding)
    if encoding in ("plain", "factors"):
        return data, {}
    return data, {n: d - sent[n] for n, d in delta.items()}


def reply_from_bytes(
    data: bytes, round: int, schema: Schema, limit: int, clients: int = 1
) -> Reply:
    """The reply in these bytes to a task of the round that went to so many clients.

    MessageError if it does not fit psi, has numbers that are not finite, or is longer than `limit`.
    """
    try:
        keys = {"round", "points", "rows", "clients", "encoding"}
        header, tensors = _from_bytes(data, "reply", keys, limit)
        encoding = get_text(header, "encoding")
        if encoding not in ENCODINGS:
            raise ValueError(f"there is no encoding '{shorten(encoding)}'")
        loss = tensors.pop("loss", None)
        if loss is None:
            raise ValueError("it has no loss")
        left, right = _take(tensors, "left/"), _take(tensors, "right/")
        if left.keys() != right.keys():
            raise ValueError("it has factors without their partners")
        coded, scales = _take(tensors, "delta/"), _take(tensors, "scale/")
        _check_empty(tensors)
        delta = _decode(coded, scales, encoding, schema)
        counts = {key: get_count(header, key) for key in ("round", "points", "rows", "clients")}
    except ValueError as error:
        raise _malformed(error) from None
    factors = {n: Factors(left[n], right[n]) for n in left}
    reply = Reply(delta=delta, loss=loss, factors=factors, **counts).check(round, schema)
    if reply.clients != clients:
        raise MessageError(
            f"a reply is of {reply.clients} clients and {clients} were asked: drop it"
        )
    return replace(reply, delta={n: delta[n] for n in schema if n in delta}).check_finite()


def _chosen(reply: Reply, encoding: str, dense: Iterable[str] = ()) -> Reply:
    """The reply with factors only where they are smaller, and without rows that are zero."""
    if encoding not in ENCODINGS:
        raise ConfigError(f"unknown encoding '{encoding}': use one of {', '.join(ENCODINGS)}")
    delta, factors = dict(reply.delta), {}
    for name, (left, right) in reply.factors.items():
        taken = left.any(1) & right.any(1)  # steps: the others are room that was not used
        pair = Factors(left[taken], right[taken])
        matrix = left.shape[1] * right.shape[1] * _size(encoding, left.dtype)
        small = sum(t.numel() * t.element_size() for t in pair) < matrix
        if small and encoding != "plain" and name not in dense:
            factors[name] = pair
        else:
            delta[name] = Factors(left, right).product()
    return replace(reply, delta=delta, factors=factors)


def _size(encoding: str, dtype: torch.dtype) -> int:
    return {"bf16": 2, "int8": 1}.get(encoding, dtype.itemsize)


def _reply_to_bytes(reply: Reply, encoding: str) -> tuple[bytes, Params]:
    """The bytes, and the dense tensors as the server will read them."""
    tensors: Params = {"loss": reply.loss}
    for name, (left, right) in reply.factors.items():
        tensors |= {f"left/{name}": left, f"right/{name}": right}
    sent: Params = {}
    for name, change in reply.delta.items():
        if encoding == "int8":
            coded, scale = _to_int8(change)
            tensors |= {f"delta/{name}": coded, f"scale/{name}": scale}
            sent[name] = _from_int8(coded, scale, change.dtype)
        else:
            coded = change.bfloat16() if encoding == "bf16" else change
            tensors[f"delta/{name}"] = coded
            sent[name] = coded.to(change.dtype)
    header = {"points": reply.points, "rows": reply.rows, "clients": reply.clients}
    header |= {"round": reply.round}
    return _to_bytes("reply", header | {"encoding": encoding}, tensors), sent


def _decode(coded: Params, scales: Params, encoding: str, schema: Schema) -> Params:
    """Dense tensors in psi's types; shapes are compared before anything grows."""
    if scales.keys() != (coded.keys() if encoding == "int8" else set()):
        raise ValueError("it has scales that belong to no tensor, or lacks some")
    found: Params = {}
    for name, tensor in coded.items():
        if name not in schema:
            raise ValueError(f"it has '{shorten(name)}', which psi has not")
        shape, dtype = schema[name]
        wanted = {"bf16": torch.bfloat16, "int8": torch.int8}.get(encoding, dtype)
        if tuple(tensor.shape) != shape or tensor.dtype != wanted:
            raise ValueError(
                f"'{shorten(name)}' has shape {tuple(tensor.shape)} and type {tensor.dtype} "
                f"instead of {shape} and {wanted}"
            )
        if encoding == "int8":
            scale = scales[name]
            if scale.dtype != torch.float32 or tuple(scale.shape) != _rows(tensor):
                raise ValueError(f"the scale of '{shorten(name)}' has a wrong shape or type")
            found[name] = _from_int8(tensor, scale, dtype)
        else:
            found[name] = tensor.to(dtype)
    return found


def _rows(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor's scales: one per row, or one for all of a vector."""
    return tuple(tensor.shape[:1]) if tensor.ndim > 1 else ()


def _to_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest of 255 levels between each row's largest magnitude and its negative."""
    rows = tensor.reshape(*_rows(tensor), -1)
    most = rows.abs().amax(-1) if rows.shape[-1] else rows.new_zeros(rows.shape[:-1])
    scale = (most / _LEVELS).float()
    levels = rows / torch.where(scale > 0, scale, 1).to(rows.dtype).unsqueeze(-1)
    coded = levels.round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
    return coded.reshape(tensor.shape), scale


def _from_int8(coded: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    shape = (*scale.shape, *(1 for _ in range(coded.ndim - scale.ndim)))
    return coded.to(dtype) * scale.to(dtype).reshape(shape)


def _to_bytes(kind: str, header: dict[str, Any], tensors: Params) -> bytes:
    text = json.dumps({"format": _FORMAT, "kind": kind} | header, sort_keys=True)
    whole = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
    content: bytes = save(whole, {_HEADER: text})
    return content


def _from_bytes(
    data: bytes, kind: str, keys: set[str], limit: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors; ValueError says what is wrong with them."""
    if len(data) > limit:
        raise MessageError(
            f"a message has {len(data):,} bytes and may have {limit:,}: drop it, or raise the limit"
        )
    data = bytes(data)
    table, metadata = describe_tensors(data)
    if metadata.keys() != {_HEADER}:
        raise ValueError("it has no header, or more than one")
    header = read_object(metadata[_HEADER])
    if header.get("format") != _FORMAT or type(header["format"]) is not int:
        raise ValueError(f"it has format {shorten(header.get('format'))} instead of {_FORMAT}")
    if header.get("kind") != kind:
        raise ValueError(f"it is no {kind}")
    if odd := header.keys() ^ {"format", "kind", *keys}:
        raise ValueError(f"'{shorten(min(odd))}' is missing in its header, or does not belong")
    tensors = load_tensors(data)
    if tensors.keys() != table.keys():
        raise ValueError("its table of tensors is not what it seems")
    return header, tensors


def _take(tensors: dict[str, Tensor], prefix: str) -> Params:
    """Those with the prefix, without it, and taken out."""
    taken = strip_prefix(tensors, prefix)
    for name in taken:
        del tensors[prefix + name]
    return taken


def _check_empty(tensors: dict[str, Tensor]) -> None:
    if tensors:
        raise ValueError(f"it has '{shorten(min(tensors))}', which does not belong")


def _malformed(error: ValueError) -> MessageError:
    return MessageError(f"a message is malformed, {shorten(error, 200)}: drop it")
