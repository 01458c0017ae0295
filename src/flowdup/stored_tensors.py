"""Reading safetensors files that anybody may have written: described first, allocated after.

`open_tensors` reads a file's own table of names, types and shapes, which must account for every
byte of it.  The caller compares the table with what it expects and only then reads the values.
Every fault is a ValueError whose text completes "the file is damaged: ...".
"""

import io
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from flowdup.errors import shorten
from flowdup.memory import check_memory
from flowdup.strict_json import get_counts, get_text, read_object

FLOATS = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}  # bytes of a number
_SIZES = FLOATS | {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
_MOST_HEADER = 2**24  # bytes: 100,000 tensors


class TensorInfo(NamedTuple):
    """Type and shape of a tensor in a file."""

    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensors:
    """An open safetensors file, whose header is checked and whose tensors are not read yet."""

    file: io.BufferedReader
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    size: int  # of the file, in bytes

    @property
    def numbers(self) -> int:
        """How many numbers all tensors have together."""
        return sum(math.prod(info.shape) for info in self.tensors.values())

    def read(self) -> bytes:
        """The whole file."""
        both = 2 * self.size  # the bytes, and the tensors that are made of them
        check_memory(both, "reading it", "read it on a larger machine", ValueError)
        self.file.seek(0)
        content = self.file.read(self.size + 1)
        if len(content) != self.size:
            raise ValueError("it changed while it was read")
        return content


@contextmanager
def open_tensors(path: Path) -> Iterator[StoredTensors]:
    """A file with its table checked; OSError if it cannot be opened."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe does not wait
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is no ordinary file")
        length = int.from_bytes(file.read(8), "little")
        if state.st_size < 8 or length > min(state.st_size - 8, _MOST_HEADER):
            raise ValueError("its table of tensors is cut off")
        tensors, metadata = _read_table(file.read(length), state.st_size - 8 - length)
        yield StoredTensors(file, tensors, metadata, state.st_size)


def describe_tensors(content: bytes) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The checked table, and the metadata, of a file's whole content."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, _MOST_HEADER):
        raise ValueError("its table of tensors is cut off")
    return _read_table(content[8 : 8 + length], len(content) - 8 - length)


def load_tensors(content: bytes) -> dict[str, Tensor]:
    """The values of a file whose table was checked."""
    try:
        found: dict[str, Tensor] = load(content)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    return found


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether no number is NaN or infinite, in float32 either."""
    found = [torch.isfinite(t.float()).all() for t in tensors.values()]
    return bool(torch.stack(found).all()) if found else True  # on a GPU it is waited for once


def _read_table(text: bytes, data: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The table in front of so many bytes of data, and the metadata in it."""
    table = read_object(text)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata are no texts")
    return _described(table, data), metadata


def _described(table: Mapping[str, object], data: int) -> dict[str, TensorInfo]:
    found, places = {}, []
    for name, entry in table.items():
        if not isinstance(entry, dict):
            raise ValueError(f"tensor '{shorten(name)}' is not described")
        dtype, shape = get_text(entry, "dtype"), get_counts(entry, "shape")
        if dtype not in _SIZES:
            raise ValueError(f"tensor '{shorten(name)}' has the type {shorten(dtype)}")
        offsets = get_counts(entry, "data_offsets")
        if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * _SIZES[dtype]:
            raise ValueError(f"tensor '{shorten(name)}' has not the size that its shape says")
        found[name] = TensorInfo(dtype, shape)
        places.append(offsets)
    end = 0
    for first, last in sorted(places):
        if first != end:
            raise ValueError("its tensors overlap or leave gaps")
        end = last
    if end != data:
        raise ValueError("it is not as long as its table says")
    return found
