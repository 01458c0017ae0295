"""Public image sets by name, verified on every load.

A set lies in the data folder as its canonical files (packed or not) or as one .npz.  Whatever the
form, it is brought to the bytes of the canonical files, these are hashed, and only then decoded.
"""

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.data.own import read_arrays
from flowdup.errors import ConfigError, DataError

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
class Source:
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


def _idx_parts(*md5: str) -> tuple[Part, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    parts = zip(names, sizes, md5, strict=True)
    return tuple(Part(f"{name}-ubyte", size, f"md5:{digest}") for name, size, digest in parts)


def _cifar_parts(*sha1: str) -> tuple[Part, ...]:
    names = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    parts = zip(names, sha1, strict=True)
    return tuple(Part(f"{name}.bin", 30_730_000, f"sha1:{digest}") for name, digest in parts)


_DIGITS = Source("digits", (1, 8, 8), mean=(0.3059,), std=(0.3754,), layout=ROWS)
_DIGITS_SHA256 = "bd55ad3b457140f7e825aff00e9a57673a06eeb3d6574a3059b81aac3a82cffc"
_MNIST = Source(
    "mnist",
    (1, 28, 28),
    mean=(0.1307,),
    std=(0.3081,),
    parts=_idx_parts(
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
    places=("mnist",),
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
)
_FASHION_MNIST = Source(
    "fashion-mnist",
    (1, 28, 28),
    mean=(0.2860,),
    std=(0.3530,),
    parts=_idx_parts(
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
    # the second is where Debian's package dataset-fashion-mnist puts them
    places=("fashion-mnist", "/usr/share/datasets/fashion-mnist"),
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
_CIFAR10 = Source(
    "cifar10",
    (3, 32, 32),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    layout=ROWS,
    parts=_cifar_parts(
        "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "26e2849e66a845b7f1e4614ae70f4889ae604628",
        "67eb016db431130d61cd03c7ad570b013799c88c",
    ),
    places=("cifar10", "cifar10/cifar-10-batches-bin", ".", "cifar-10-batches-bin"),
    url="https://www.cs.toronto.edu/~kriz/",
    archive="cifar-10-binary.tar.gz",
)
SOURCES = {source.name: source for source in (_DIGITS, _MNIST, _FASHION_MNIST, _CIFAR10)}


def data_folder() -> Path:
    """Where image sets are kept: $FLOWDUP_DATA, or `flowdup` in the user's cache folder."""
    if folder := os.environ.get("FLOWDUP_DATA"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowdup"


def named(source: str | Source) -> Source:
    """The source of that name; a Source of one's own passes through."""
    if isinstance(source, Source):
        return source
    if source not in SOURCES:
        raise ConfigError(f"there is no image set '{source}': choose one of {', '.join(SOURCES)}")
    return SOURCES[source]


def find(source: str | Source, folder: Path | None = None) -> Path | None:
    """Where the set lies (an .npz, an archive, a folder of parts), unverified; None: nowhere."""
    source, folder = named(source), folder or data_folder()
    if not source.parts:
        bundle = find_spec("sklearn")
        return Path(bundle.origin).parent if bundle and bundle.origin else None
    npz = folder / f"{source.name.replace('-', '_')}.npz"
    if npz.is_file():
        return npz
    for place in (folder / name for name in source.places):
        if all(_stored(place, part) for part in source.parts):
            return place
        if source.archive and (place / source.archive).is_file():
            return place / source.archive
    return None


def verify(source: str | Source, folder: Path | None = None) -> Path:
    """Where the set lies, every byte checked; DataError if it is missing or corrupt."""
    return _read(named(source), folder)[0]


def load_images(source: str | Source, folder: Path | None = None) -> Images:
    """The set, verified; DataError if it is missing or corrupt.

    `digits` has no official split: its first 1,300 images train, the other 497 test.  The original
    order roughly groups the writers, so that the test images mostly come from other hands.
    """
    source = named(source)
    files = _read(source, folder)[1]
    x_train, y_train, x_test, y_test = source.layout.decode(files, source.shape)
    return Images(
        torch.from_numpy(x_train.astype(np.uint8).reshape(-1, *source.shape)),
        torch.from_numpy(y_train.astype(np.int64)),
        torch.from_numpy(x_test.astype(np.uint8).reshape(-1, *source.shape)),
        torch.from_numpy(y_test.astype(np.int64)),
    )


def read_parts(source: Source, path: Path) -> list[bytes]:
    """The verified parts that one stored file holds: all in an archive, otherwise a single one."""
    if path.name == source.archive:
        return _read_archive(source, path)
    part = next(part for part in source.parts if part.name == path.name.removesuffix(".gz"))
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(part.size + 1)  # a longer file shows without being read to its end
    except (OSError, EOFError, zlib.error) as error:
        raise _corrupt(source, path, str(error)) from error
    return [_checked(source, part, data, path)]


def _read(source: Source, folder: Path | None) -> tuple[Path, list[bytes]]:
    path = find(source, folder)
    if path is None:
        raise DataError(
            f"{source.name} is not in {folder or data_folder()}: run `flowdup data fetch "
            f"{source.name}`, or set FLOWDUP_DATA to the folder that has it"
        )
    if not source.parts:
        return path, _read_digits(path)
    if path.suffix == ".npz":
        return path, _read_npz(source, path)
    files = [_stored(path, part) for part in source.parts] if path.is_dir() else [path]
    return path, [data for file in files if file for data in read_parts(source, file)]


def _read_archive(source: Source, path: Path) -> list[bytes]:
    sizes = {part.name: part.size for part in source.parts}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                if name in sizes and (file := archive.extractfile(member)):
                    found[name] = file.read(sizes[name] + 1)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise _corrupt(source, path, str(error)) from error
    return [_checked(source, part, found.get(part.name, b""), path) for part in source.parts]


def _read_npz(source: Source, path: Path) -> list[bytes]:
    try:
        stored = read_arrays(path)
        arrays = [stored[entry] for entry in ("x_train", "y_train", "x_test", "y_test")]
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


def _checked(source: Source, part: Part, data: bytes, path: Path) -> bytes:
    algorithm, digest = part.digest.split(":")
    actual = hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    if len(data) != part.size or actual != digest:
        raise _corrupt(source, path, f"it does not hold the canonical {part.name}")
    return data


def _corrupt(source: Source, path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is corrupt and is not used ({why}): "
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
