"""Reading .npz and .npy files that anybody may have written, and writing an .npy.

Of an .npz only the arrays that are asked for and single values are read; of the others, however
large, only the headers.  Sizes are known before anything is allocated, and pickles are refused.
"""

import io
import math
import threading
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flowdup.errors import DataError, shorten
from flowdup.files import write_atomic
from flowdup.memory import check_memory

Array = NDArray[Any]

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")  # a file, or one without members
_NPY = b"\x93NUMPY"  # what an .npy file begins with
_LARGEST_SCALAR = 4096  # bytes
_ONE_AT_A_TIME = threading.RLock()  # Python 3.11's ast, which reads headers, mixes up threads


class StoredArrays(NamedTuple):
    """What was read of a NumPy file."""

    names: tuple[str, ...]  # of all arrays in the file
    arrays: dict[str, Array]  # those that were read


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int  # bytes of the values

    @property
    def scalar(self) -> bool:
        return self.shape == () and self.dtype.kind in "biufU" and self.size <= _LARGEST_SCALAR


def read_arrays(path: Path, wanted: Collection[str]) -> StoredArrays:
    """Arrays of an .npz by name and its single values, or the one array of an .npy, mapped, as x.

    An .npz with one array gives it whatever its name.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}: give the path of an .npz or .npy file")
    try:
        with _ONE_AT_A_TIME:
            return _read(path, wanted)
    except DataError:
        raise
    except Exception as error:  # damage surfaces as anything from zlib.error to MemoryError
        raise DataError(
            f"{path} is no readable NumPy file ({shorten(error, 300)}): write it again with "
            "numpy.savez"
        ) from error


def write_array(path: Path, values: ArrayLike) -> None:
    """An .npy file, written as a whole or not at all."""
    content = io.BytesIO()
    np.save(content, np.asarray(values))
    write_atomic(path, content.getvalue())


def _read(path: Path, wanted: Collection[str]) -> StoredArrays:
    with path.open("rb") as file:
        start = file.read(len(_NPY))
    if start[:4] in _ZIP:
        return _read_npz(path, wanted)
    if start != _NPY:  # or NumPy would speak of pickles
        raise ValueError("it begins as neither an .npz nor an .npy file does")
    # not mode "c": Linux refuses a writable mapping that is larger than memory
    mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(mapped, np.ndarray):
        raise ValueError("it is no array")
    return StoredArrays(("x",), {"x": mapped})


def _read_npz(path: Path, wanted: Collection[str]) -> StoredArrays:
    with zipfile.ZipFile(path) as archive:
        members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
        found = {}
        for name, member in members.items():
            header = _read_header(archive, member)
            if name in wanted or header.scalar or len(members) == 1:
                found[name] = _read_member(archive, member, header, path)
        return StoredArrays(tuple(members), found)


def _read_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> _Header:
    """Shape and type, of which the member's size must be the consequence."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):  # 3.0 is for names that no array of numbers has
            raise ValueError(f"{member.filename} has the format {version}")
        readers = (np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0)
        shape, _, dtype = readers[version[0] - 1](file)
        size = math.prod(shape) * dtype.itemsize
        whole = file.tell() + size == member.file_size or dtype.hasobject  # a pickle, never read
        if min(shape, default=0) < 0 or not whole:
            raise ValueError(f"{member.filename} has not the size that its header says")
    return _Header(shape, dtype, size)


def _read_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, header: _Header, path: Path
) -> Array:
    remedy = "split the client's points among several"
    check_memory(header.size, f"{member.filename} of {path}", remedy, DataError)
    with archive.open(member) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
        file.read(1)  # at its end the checksum is compared
    return array
