"""Image sets that are canonical files, verified on every load.

A set lies in the data folder as its canonical files (packed or not) or as one .npz.  Whatever the
form, it is brought to the bytes of the canonical files, these are hashed, and only then decoded.
"""

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.data.numpy_files import read_arrays
from flowdup.errors import DataError, shorten

Array = NDArray[np.uint8]


@dataclass(frozen=True)
class Images:
    """A set of images: x uint8 [n, channels, height, width], y int64 [n]."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


@dataclass(frozen=True)
class Part:
    """One canonical file, unpacked."""

    name: str
    size: int  # bytes
    digest: str  # "md5:..." or "sha1:..."


@dataclass(frozen=True)
class Layout:
    """How x_train, y_train, x_test and y_test become canonical files, and back.

    `encode` takes the arrays as an .npz holds them (channels last) and the size of every file;
    `decode` takes the files and the shape of an image, and gives the pixels channels first.
    """

    encode: Callable[[Sequence[Array], Sequence[int]], list[bytes]]
    decode: Callable[[Sequence[bytes], tuple[int, ...]], list[Array]]


def _idx_encode(arrays: Sequence[Array], _: Sequence[int]) -> list[bytes]:
    heads = [bytes([0, 0, 8, a.ndim]) + np.array(a.shape, ">u4").tobytes() for a in arrays]
    return [head + array.tobytes() for head, array in zip(heads, arrays, strict=True)]


def _idx_decode(files: Sequence[bytes], _: tuple[int, ...]) -> list[Array]:
    return [np.frombuffer(file, np.uint8, offset=4 + 4 * file[3]) for file in files]


def _rows_encode(arrays: Sequence[Array], sizes: Sequence[int]) -> list[bytes]:
    def rows(x: Array, y: Array) -> Array:
        pixels = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)
        return np.concatenate([y.reshape(-1, 1), pixels], axis=1).reshape(-1)

    values = np.concatenate([rows(*arrays[:2]), rows(*arrays[2:])])
    return [piece.tobytes() for piece in np.split(values, np.cumsum(sizes[:-1]))]


def _rows_decode(files: Sequence[bytes], shape: tuple[int, ...]) -> list[Array]:
    def columns(data: bytes) -> list[Array]:
        rows = np.frombuffer(data, np.uint8).reshape(-1, 1 + prod(shape))
        return [rows[:, 1:], rows[:, 0]]

    return columns(b"".join(files[:-1])) + columns(files[-1])


IDX = Layout(_idx_encode, _idx_decode)  # one file per array: its shape, then its values
ROWS = Layout(_rows_encode, _rows_decode)  # per image its label, then its pixels; last file: test


@dataclass(frozen=True)
class ImageSet:
    """What is known of a set: how networks read it, where its files are, what they hash to."""

    name: str
    shape: tuple[int, int, int]  # channels, height, width
    mean: tuple[float, ...]  # per channel, pixels counted from 0 to 1
    std: tuple[float, ...]
    classes: int = 10
    layout: Layout = IDX
    parts: tuple[Part, ...] = ()  # in the layout's order; only digits has none
    places: tuple[str, ...] = ()  # folders, seen from the data folder; the first is for downloads
    url: str = ""  # the folder to download from
    archive: str = ""  # the .tar.gz there that holds all parts; without one, each part is a .gz

    @property
    def downloads(self) -> tuple[str, ...]:
        """The names of the files at `url`."""
        return (self.archive,) if self.archive else tuple(f"{part.name}.gz" for part in self.parts)

    def find(self, folder: Path) -> Path | None:
        """Where it lies (an .npz, an archive, a folder of parts), unverified; None: nowhere."""
        if not self.parts:
            bundle = find_spec("sklearn")
            return Path(bundle.origin).parent if bundle and bundle.origin else None
        npz = folder / f"{self.name.replace('-', '_')}.npz"
        if npz.is_file():
            return npz
        for place in (folder / name for name in self.places):
            if all(_stored(place, part) for part in self.parts):
                return place
            if self.archive and (place / self.archive).is_file():
                return place / self.archive
        return None

    def verify(self, folder: Path) -> Path:
        """Where it lies, every byte checked; DataError if it is missing or corrupt."""
        return self._read(folder)[0]

    def load(self, folder: Path) -> Images:
        """The images, verified; DataError if they are missing or corrupt.

        `digits` has no official split: its first 1,300 images train, the other 497 test.  The
        original order roughly groups the writers, so that the test images mostly come from other
        hands.
        """
        x_train, y_train, x_test, y_test = self.layout.decode(self._read(folder)[1], self.shape)
        return Images(
            torch.from_numpy(x_train.astype(np.uint8).reshape(-1, *self.shape)),
            torch.from_numpy(y_train.astype(np.int64)),
            torch.from_numpy(x_test.astype(np.uint8).reshape(-1, *self.shape)),
            torch.from_numpy(y_test.astype(np.int64)),
        )

    def read_parts(self, path: Path) -> list[bytes]:
        """The verified parts that a stored file holds: all in an archive, otherwise one."""
        if path.name == self.archive:
            return _read_archive(self, path)
        part = next(part for part in self.parts if part.name == path.name.removesuffix(".gz"))
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                data = file.read(part.size + 1)  # a longer file shows without being read to its end
        except (OSError, EOFError, zlib.error) as error:
            raise _corrupt(self, path, str(error)) from error
        return [_checked(self, part, data, path)]

    def _read(self, folder: Path) -> tuple[Path, list[bytes]]:
        path = self.find(folder)
        if path is None:
            raise DataError(
                f"{self.name} is not in {folder}: run `flowdup data fetch {self.name}`, or set "
                "FLOWDUP_DATA to the folder that has it"
            )
        if not self.parts:
            return path, _read_digits(path)
        if path.suffix == ".npz":
            return path, _read_npz(self, path)
        files = [_stored(path, part) for part in self.parts] if path.is_dir() else [path]
        return path, [data for file in files if file for data in self.read_parts(file)]


_DIGITS_SHA256 = "bd55ad3b457140f7e825aff00e9a57673a06eeb3d6574a3059b81aac3a82cffc"


_DAMAGE = (
    *(OSError, EOFError, zlib.error, tarfile.TarError),
    *(ValueError, LookupError, OverflowError, RecursionError, MemoryError),
)


class _Limited(io.RawIOBase):
    """A stream of which only so many bytes may be read, however many somebody packed into it."""

    def __init__(self, stream: gzip.GzipFile, most: int) -> None:
        self.stream, self.left = stream, most

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(min(size, self.left + 1) if size >= 0 else self.left + 1)
        self.left -= len(data)
        if self.left < 0:
            raise ValueError("it unpacks to more than the set has")
        return data


def _read_archive(source: ImageSet, path: Path) -> list[bytes]:
    sizes = {part.name: part.size for part in source.parts}
    found: dict[str, bytes] = {}
    most = 2 * sum(sizes.values()) + 2**20
    try:
        with (
            gzip.open(path) as unpacked,
            tarfile.open(fileobj=cast(IO[bytes], _Limited(unpacked, most)), mode="r|") as archive,
        ):
            for member in archive:
                name = Path(member.name).name
                if name in sizes and member.isreg() and (file := archive.extractfile(member)):
                    found[name] = file.read()
    except _DAMAGE as error:
        raise _corrupt(source, path, str(error)) from error
    return [_checked(source, part, found.get(part.name, b""), path) for part in source.parts]


def _read_npz(source: ImageSet, path: Path) -> list[bytes]:
    try:
        names = ("x_train", "y_train", "x_test", "y_test")
        stored = read_arrays(path, names).arrays
        arrays = [stored[entry] for entry in names]
        if any(array.dtype.kind not in "iu" for array in arrays):
            raise ValueError("its values are not whole numbers")
        sizes = [part.size for part in source.parts]
        files = source.layout.encode([array.astype(np.uint8) for array in arrays], sizes)
    except KeyError as error:
        raise _corrupt(source, path, f"it has no array {error}") from error
    except (DataError, ValueError) as error:
        raise _corrupt(source, path, str(error)) from error
    parts = zip(source.parts, files, strict=True)
    return [_checked(source, part, data, path) for part, data in parts]


def _checked(source: ImageSet, part: Part, data: bytes, path: Path) -> bytes:
    algorithm, digest = part.digest.split(":")
    actual = hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    if len(data) != part.size or actual != digest:
        raise _corrupt(source, path, f"it does not hold the canonical {part.name}")
    return data


def _corrupt(source: ImageSet, path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is corrupt and is not used ({shorten(why, 300)}): "
        f"delete it and run `flowdup data fetch {source.name}`"
    )


def _stored(place: Path, part: Part) -> Path | None:
    files = (place / part.name, place / f"{part.name}.gz")
    return next((file for file in files if file.is_file()), None)


def _read_digits(path: Path) -> list[bytes]:
    """scikit-learn's images in the layout of ROWS: 1,300 for training, the others for testing."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  (slow to import)

        y, x = (load_digits()[name].astype(np.int64) for name in ("target", "data"))
        x = (x * 255 + 8) // 16  # 0..16 to 0..255, rounded
        data = np.concatenate([y[:, None], x], axis=1).astype(np.uint8).tobytes()
        if hashlib.sha256(data).hexdigest() != _DIGITS_SHA256:
            raise ValueError("they are other images")
    except Exception as error:  # damage surfaces as anything from zlib.error to ImportError
        raise DataError(
            f"the digits of {path} are corrupt ({error}): reinstall scikit-learn"
        ) from error
    cut = 1300 * (1 + 64)
    return [data[:cut], data[cut:]]
