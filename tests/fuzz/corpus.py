"""Whole files of every kind that flowdup reads, which the fuzzer then changes."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from small import METHODS, client, population

import flowdup
from flowdup.checkpoint import checkpoint_in, load_checkpoint
from flowdup.data.femnist import Femnist
from flowdup.data.images import IDX, ROWS, ImageSet, Layout, Part
from flowdup.familiarity import fit_familiarity, store_familiarity
from flowdup.personalize import psi_digest

TABLE: dict[str, Any] = {
    "model": "mlp",
    "method": METHODS["flowdup"],
    "data": {
        "source": "digits",
        "train_clients": 6,
        "validation_clients": 2,
        "test_clients": 3,
        "points": 20,
    },
    "server": {"rounds": 2, "cohort": 2},
    "run": {"evaluate_every": 1, "checkpoint_every": 1},
}
GREY = np.arange(5 * 64, dtype=np.uint8).reshape(5, 8, 8)
COLOUR = np.arange(4 * 48, dtype=np.uint8).reshape(4, 4, 4, 3)


def make_corpus(folder: Path) -> None:
    """Everything that cases are made from, written once."""
    for name, table in (("run", TABLE), ("prox", TABLE | {"method": METHODS["fedprox"]})):
        config = flowdup.read_config(table)
        list(flowdup.train_run(config, folder / name))
        flowdup.evaluate_run(folder / name)
    own = folder / "own"  # a federation with inputs as in tests/small.py
    config = flowdup.read_config({k: v for k, v in TABLE.items() if k != "data"})
    list(flowdup.train_run(config, own, population=population()))
    federation = flowdup.load(own)
    federation.personalize(client(0, 20).x).save(folder / "model.safetensors")
    clients = [client(i, 20).x for i in range(30)]
    known = fit_familiarity(clients[:10], clients[10:], federation.embedding)
    place, state = checkpoint_in(own), load_checkpoint(checkpoint_in(own))[1]
    store_familiarity(place, known, psi_digest(state.deployed))
    figure = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><g/></svg>\n'
    (folder / "run" / "embedding.svg").write_bytes(figure)
    _clients(folder / "clients")
    _tables(folder)


def _clients(folder: Path) -> None:
    folder.mkdir()
    rows: dict[str, Any] = {
        "x": np.ones((4, 1, 8, 8), np.uint8),
        "y": np.array([0, 1, 2, -1]),
        "site": "north",
    }
    np.savez(folder / "stored.npz", **rows, age=np.array(40), dose=np.float32(0.5))
    np.savez_compressed(folder / "packed.npz", x=np.ones((3, 5)), y=np.arange(3), other=np.ones(9))
    np.save(folder / "mapped.npy", np.ones((3, 5), np.float32))


def table() -> pa.Table:
    return pa.table(
        {
            "client": ["bo", "al", "bo", "al", "cy"],
            "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 1.0]],
            "label": [1, None, 0, None, 2],
            "site": ["north", "south", "north", "south", "north"],
            "age": pa.array([40, 50, 40, 51, 60], pa.uint64()),
            "kind": pa.array(["a", "b", "a", "b", "a"]).dictionary_encode(),
        }
    )


def _tables(folder: Path) -> None:
    pq.write_table(table(), folder / "plain.parquet", compression="none")
    pq.write_table(table(), folder / "packed.parquet", compression="zstd")
    with (
        pa.OSFile(str(folder / "data.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table().schema) as out,
    ):
        out.write_table(table())


def _part(name: str, content: bytes) -> Part:
    return Part(name, len(content), f"sha1:{hashlib.sha1(content).hexdigest()}")


def _set(name: str, shape: tuple[int, int, int], layout: Layout, files: dict[str, bytes]) -> Any:
    zeros = (0.0,) * shape[0]
    parts = tuple(_part(n, content) for n, content in files.items())
    archive = f"{name}.tar.gz" if layout is ROWS else ""
    return ImageSet(
        name, shape, zeros, (1.0,) * shape[0], 4, layout, parts, (name,), archive=archive
    )


Encode = Callable[[Sequence[Any], Sequence[int]], list[bytes]]


def image_sets() -> list[tuple[ImageSet, dict[str, bytes]]]:
    """Each with the files of one of its forms, by their paths in the data folder."""
    y = np.arange(5, dtype=np.uint8) % 4
    grey = dict(zip("abcd", IDX.encode([GREY, y, GREY[:2], y[:2]], ()), strict=True))
    sizes = (2 * 49, 2 * 49, 2 * 49)
    arrays = [COLOUR, y[:4], COLOUR[:2], y[:2]]
    colour = dict(zip("efg", ROWS.encode(arrays, sizes), strict=True))
    small, small_colour = _set("grey", (1, 8, 8), IDX, grey), _set("rgb", (3, 4, 4), ROWS, colour)
    packed = {f"grey/{n}.gz": gzip.compress(content) for n, content in grey.items()}
    buffer, tarred = io.BytesIO(), io.BytesIO()
    names = ("x_train", "y_train", "x_test", "y_test")
    stored: dict[str, Any] = dict(zip(names, arrays, strict=True))
    np.savez(buffer, **stored)
    with tarfile.open(fileobj=tarred, mode="w:gz") as archive:
        for name, content in colour.items():
            entry = tarfile.TarInfo(f"rgb/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return [
        (small, {f"grey/{n}": content for n, content in grey.items()}),
        (small, packed),
        (small_colour, {"rgb.npz": buffer.getvalue()}),
        (small_colour, {"rgb/rgb.tar.gz": tarred.getvalue()}),
    ]


def femnist() -> tuple[Femnist, dict[str, Any]]:
    """LEAF's JSON of a sample, whose points nobody knows the digest of."""
    points = {"x": [[0.0] * 783 + [1.0], [1.0] * 784], "y": [3, 61]}
    stored = {"users": ["a", "b"], "num_samples": [2, 2], "user_data": {"a": points, "b": points}}
    return Femnist(), json.loads(json.dumps(stored))
