"""FEMNIST: handwritten digits and letters of NIST's Special Database 19, a client per writer.

LEAF (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018) publishes a script that makes
the set, not the set.  Its order of writers and points is that of the maker's disk, and it stores
the first image of every writer but one twice.  Here the double is dropped, writers stand in the
order of their names and points in the order of their hashes: every copy gives the same clients.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowdup.data.clients import ClientData
from flowdup.data.numpy_files import read_arrays
from flowdup.errors import DataError, shorten

Array = NDArray[Any]
Writer = tuple[str, Array, Array]  # name, pixels uint8 [n, pixels], labels [n]

_SCRIPT = "./preprocess.sh in data/femnist of github.com/TalwalkarLab/leaf"
_PILLOW = "Pillow 7, 8 or 9"  # 6 makes other pixels, 10 lacks a name that the script uses
_COMPLETE = re.compile(r"all_data_\d+\.json")  # a sample's names go on: all_data_0_niid_1.json
_DAMAGE = (
    DataError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True)
class Femnist:
    """What is known of the set: how networks read it, how large it is, what it hashes to.

    The digest is SHA-256 over the writers in the order of their names: per writer the name, a zero
    byte, and the SHA-256 of its points' hashes in ascending order.  A point's hash is the SHA-256
    of its label (one byte) and its pixels.
    """

    name: str = "femnist"
    shape: tuple[int, int, int] = (1, 28, 28)
    mean: tuple[float, ...] = (0.9637,)  # pixels counted from 0 to 1; white is 1
    std: tuple[float, ...] = (0.1591,)
    classes: int = 62  # 0-9, A-Z, a-z
    writers: int = 3_597
    points: int = 814_255
    digest: str = "fd9f2ea962782fe9be9da76cdf58c3f061429409cb2f8876ed1b3075c857c00e"
    places: tuple[str, ...] = ("femnist", "femnist/all_data", "femnist/data/all_data")

    def find(self, folder: Path) -> Path | None:
        """Where it lies (an .npz, or a folder of LEAF's JSON files), unverified; None: nowhere."""
        npz = folder / f"{self.name}.npz"
        if npz.is_file():
            return npz
        places = (folder / place for place in self.places)
        return next((place for place in places if _json_files(place)), None)

    def verify(self, folder: Path) -> Path:
        """Where it lies, every point checked; DataError if it is missing, corrupt or a sample."""
        path, clients = self._read(folder)
        if len(clients) < self.writers:
            raise DataError(
                f"{path} is a sample of {len(clients):,} of {self.writers:,} writers: it is "
                f"consistent and can be used, but for the whole set run {_SCRIPT} without --sf"
            )
        return path

    def load(self, folder: Path) -> list[ClientData]:
        """The writers by name, verified; DataError if they are missing or corrupt.

        A sample that LEAF has drawn (`--sf`, `-k`) is checked for consistency only.  LEAF may
        shuffle one writer per file of a sample, whose double is then not to be told and stays.
        """
        return self._read(folder)[1]

    def _read(self, folder: Path) -> tuple[Path, list[ClientData]]:
        path = self.find(folder)
        if path is None:
            raise DataError(
                f"{self.name} is not in {folder} and cannot be downloaded: run {_SCRIPT} with "
                f"{_PILLOW} and put the JSON files of its data/all_data in {folder / self.name}, "
                "or set FLOWDUP_DATA to the folder that has them"
            )
        clients: dict[str, ClientData] = {}
        hashes: dict[str, bytes] = {}
        packed = path.is_file()
        files, read = ([path], self._read_npz) if packed else (_json_files(path), self._read_json)
        for file in files:  # one in memory at a time
            try:
                for name, x, y in read(file):
                    if name in clients:
                        raise ValueError(f"writer {name} is there twice")
                    clients[name], hashes[name] = self._client(name, x, y)
            except _DAMAGE as error:
                raise _corrupt(file, error) from error
        complete = packed or all(_COMPLETE.fullmatch(file.name) for file in files)
        points = sum(map(len, clients.values()))
        if complete or (len(clients), points) == (self.writers, self.points):
            self._check_digest(path, hashes, points)
        return path, [clients[name] for name in sorted(clients)]

    def _read_npz(self, path: Path) -> Iterator[Writer]:
        keys = ("x", "y", "writer", "writer_names")
        stored = read_arrays(path, keys).arrays
        x, y, writer, names = (stored[key] for key in keys)
        if x.dtype != np.uint8 or x.shape != (len(y), *self.shape[1:]) or y.shape != writer.shape:
            raise ValueError("its arrays do not fit each other")
        cuts = np.flatnonzero(writer[1:] != writer[:-1]) + 1
        pieces = (np.split(array, cuts) for array in (writer, x.reshape(len(x), -1), y))
        for who, pixels, labels in zip(*pieces, strict=True):
            yield str(names[who[0]]), pixels, self._labels(labels)

    def _read_json(self, path: Path) -> Iterator[Writer]:
        with path.open(encoding="utf-8") as file:
            stored = json.load(file, parse_float=cache(float))  # 256 floats, not one per pixel
        users, counts, data = (stored[key] for key in ("users", "num_samples", "user_data"))
        if len(users) != len(counts) or sorted(users) != sorted(data):
            raise ValueError("its users, num_samples and user_data do not fit each other")
        for name, count in zip(users, counts, strict=True):
            points = data.pop(name)
            x, y = 255 * np.array(points["x"], np.float64), np.array(points["y"])
            if x.shape != (count, self.shape[1] * self.shape[2]) or y.shape != (count,):
                raise ValueError(
                    f"writer {name} has not {count} images of 28x28 and as many labels"
                )
            pixels = np.rint(x)
            if not ((np.abs(x - pixels) < 1e-6) & (pixels >= 0) & (pixels <= 255)).all():
                raise ValueError(f"writer {name} has pixels other than 0/255 to 255/255")
            yield str(name), pixels.astype(np.uint8), self._labels(y)

    def _labels(self, y: Array) -> Array:
        if y.dtype.kind not in "iu" or not y.size or y.min() < 0 or y.max() >= self.classes:
            raise ValueError(f"its labels are not whole numbers from 0 to {self.classes - 1}")
        return y.astype(np.int64)

    def _client(self, name: str, x: Array, y: Array) -> tuple[ClientData, bytes]:
        """The writer without LEAF's double, and its hash; x is put in order where it stands."""
        rows = np.concatenate([y[:, None].astype(np.uint8), x], axis=1)
        hashes = [hashlib.sha256(row).digest() for row in rows]
        double = hashes[:1] == hashes[1:2]  # equal points elsewhere are the writer's own
        order = sorted(range(int(double), len(x)), key=hashes.__getitem__)
        kept = x[: len(order)]  # not a copy: the pixels are in memory once
        kept[:] = x[order]
        images = torch.from_numpy(kept).reshape(-1, *self.shape)
        digest = hashlib.sha256(b"".join(hashes[i] for i in order)).digest()
        return ClientData(images, torch.from_numpy(y[order]), name), digest

    def _check_digest(self, path: Path, hashes: dict[str, bytes], points: int) -> None:
        digest = hashlib.sha256()
        for name in sorted(hashes):
            digest.update(name.encode() + b"\0" + hashes[name])
        if (len(hashes), points) != (self.writers, self.points):
            raise _corrupt(
                path,
                f"it has {points:,} points of {len(hashes):,} writers, the set {self.points:,} "
                f"of {self.writers:,}",
            )
        if digest.hexdigest() != self.digest:
            raise _corrupt(path, f"it does not hold the canonical points, those of {_PILLOW}")


def _json_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("all_data*.json"))


def _corrupt(path: Path, why: object) -> DataError:
    why = shorten(f"it has no {why}" if isinstance(why, KeyError) else str(why), 300)
    return DataError(
        f"{path} is corrupt and is not used ({why}): delete it and run {_SCRIPT} with {_PILLOW}"
    )
