"""Data files made to do harm: one sentence, little memory, little time."""

import gzip
import io
import json
import resource
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flowdup.batches import batch_plan, cap_batch_size
from flowdup.client import ClientConfig
from flowdup.config import load_config, read_config
from flowdup.data.clients import ClientData
from flowdup.data.femnist import Femnist
from flowdup.data.fetch import fetch
from flowdup.data.images import ROWS, ImageSet, Part
from flowdup.data.user_data import read_folder, read_inputs, read_table
from flowdup.errors import ConfigError, DataError
from flowdup.random import Stream
from flowdup.run import Simulation


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        action()
    sentence = str(caught.value)
    assert len(sentence) < 1000
    return sentence


def npz(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def claimed(shape: str, dtype: str = "<f4", values: bytes = b"") -> bytes:
    """An .npy whose header claims a shape."""
    head = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}"
    head += " " * (63 - (len(head) + 10) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + values


X = npy(np.ones((3, 2), np.float32))


def test_an_array_that_nobody_asks_for_costs_nothing(tmp_path: Path) -> None:
    """A quarter of a GiB of zeros beside x."""
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x.npy", X)
        archive.writestr("age.npy", npy(np.array(40)))
        with archive.open("unused.npy", "w", force_zip64=True) as file:
            file.write(claimed(f"({2**26},)"))
            for _ in range(16):
                file.write(bytes(2**24))
    code = (
        "import sys, resource, torch; from pathlib import Path\n"
        "from flowdup.data.user_data import read_folder\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "client, = read_folder(Path(sys.argv[1]))['all']\n"
        "assert client.x.shape == (3, 2) and client.traits == {'age': 40}\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 50_000  # kB


HOSTILE = {
    "claims much": claimed("(1000000000000, 2)"),
    "claims more than 64 bits": claimed(f"({10**30}, 2)"),
    "claims less than nothing": claimed("(-3, 2)"),
    "claims minus times minus": claimed("(-3, -2)", values=bytes(24)),
    "an expression": claimed("__import__('os').system('true')"),
    "nested": claimed("(" * 3000),
    "a type of objects": claimed("(3,)", "|O", b"cposix\nsystem\n"),
    "a type of nothing": claimed("(3, 2)", "|V0"),
    "no type": claimed("(3, 2)", "nope"),
    "cut": X[:-4],
    "longer": X + b"1234",
    "a pickle": b"\x80\x04cposix\nsystem\n",
    "empty": b"",
    "version 3": X[:6] + b"\x03" + X[7:],
    "version 9": X[:6] + b"\x09" + X[7:],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_array_that_lies_about_itself_is_one_sentence(kind: str, tmp_path: Path) -> None:
    npz(tmp_path / "a.npz", {"x": HOSTILE[kind]})
    assert "a.npz" in refused(lambda: read_folder(tmp_path))
    npz(tmp_path / "a.npz", {"x": X, "y": HOSTILE[kind]})
    assert "a.npz" in refused(lambda: read_folder(tmp_path))
    if kind != "longer":  # numpy maps the array and leaves what follows
        (tmp_path / "b.npy").write_bytes(HOSTILE[kind])
        refused(lambda: read_inputs(tmp_path / "b.npy"))


def test_a_bomb_larger_than_memory_is_not_unpacked(tmp_path: Path) -> None:
    """1 GiB of zeros in 1 MB, for a process that may have 1.5 GiB."""
    with (
        zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w", force_zip64=True) as file,
    ):
        file.write(claimed(f"({2**18}, 1024)"))
        for _ in range(64):
            file.write(bytes(2**24))
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**29, limits[1]))
    try:
        assert "memory" in refused(lambda: read_folder(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def test_a_damaged_checksum_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("x.npy", X)
    content = path.read_bytes().replace(np.ones(6, np.float32).tobytes(), bytes(24))
    path.write_bytes(content)
    assert "CRC" in refused(lambda: read_folder(tmp_path))


def test_a_label_beyond_63_bits_is_not_read_as_no_label(tmp_path: Path) -> None:
    y = np.array([0, 1, 2**64 - 1], np.uint64)
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)), y=y)
    assert str(2**64 - 1) in refused(lambda: read_folder(tmp_path))
    rows = pa.table({"client": ["a"] * 3, "x": [1.0, 2.0, 3.0], "label": pa.array(y)})
    pq.write_table(rows, tmp_path / "t.parquet")
    assert str(2**64 - 1) in refused(
        lambda: read_table(tmp_path / "t.parquet", "client", "label", ["x"])
    )


def test_a_few_bytes_that_stand_for_more_values_than_memory_holds(tmp_path: Path) -> None:
    rows = pa.table({"client": pa.array(np.zeros(2 * 10**6, np.int8)), "x": np.zeros(2 * 10**6)})
    path = tmp_path / "t.parquet"
    pq.write_table(rows, path)
    assert path.stat().st_size < 10**5
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (2**25, limits[1]))
    try:
        assert "memory" in refused(lambda: read_table(path, "client", None, ["x"]))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.mark.parametrize(
    "state",
    [
        "[" * 10**5,
        "[]",
        "{}",
        '{"_data_files": 3}',
        '{"_data_files": [3]}',
        '{"_data_files": [{}]}',
        '{"_data_files": [{"filename": "../secret.arrow"}]}',
        '{"_data_files": [{"filename": "/etc/passwd"}]}',
        '{"_data_files": []}',
    ],
    ids=lambda state: state[:40],
)
def test_a_datasets_state_that_makes_no_sense_is_one_sentence(state: str, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rows = pa.table({"client": ["a"], "x": [1.0]})
    with (
        pa.OSFile(str(tmp_path / "secret.arrow"), "wb") as file,
        pa.ipc.new_stream(file, rows.schema) as out,
    ):
        out.write_table(rows)
    (folder / "state.json").write_text(state)
    refused(lambda: read_table(folder, "client", None, ["x"]))


PARTS = {"a.bin": bytes(5), "b.bin": bytes(5)}
TAR = ImageSet(
    "small",
    (1, 2, 2),
    (0.0,),
    (1.0,),
    layout=ROWS,
    parts=tuple(Part(n, 5, "sha1:a10909c2cdcaf5adb7e6b092a4faba558b62bd96") for n in PARTS),
    places=("small",),
    archive="small.tar.gz",
)


def archive(folder: Path, entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    (folder / "small").mkdir(exist_ok=True)
    with tarfile.open(folder / "small" / "small.tar.gz", "w:gz") as file:
        for entry, content in entries:
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))


def linked(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


def test_links_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    whole = [(tarfile.TarInfo(f"../../{n}"), content) for n, content in PARTS.items()]
    archive(tmp_path, whole)
    TAR.verify(tmp_path)  # a path is only a name here: nothing is unpacked to a disk
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
        for target in ("b.bin", "missing", "/etc/passwd", "../x", "a.bin"):
            archive(tmp_path, [(linked("a.bin", kind, target), b""), whole[1]])
            assert "canonical a.bin" in refused(lambda: TAR.verify(tmp_path))
    assert not list(tmp_path.glob("**/*.bin"))


def test_an_archive_that_unpacks_to_far_more_than_the_set_is_left(tmp_path: Path) -> None:
    archive(tmp_path, [(tarfile.TarInfo("junk"), bytes(2**22))])
    assert "more than the set" in refused(lambda: TAR.verify(tmp_path))
    long = tarfile.TarInfo("a.bin")
    long.pax_headers = {"comment": "x" * 2**22}
    archive(tmp_path, [(long, b"")])
    assert "more than the set" in refused(lambda: TAR.verify(tmp_path))
    path = tmp_path / "small" / "small.tar.gz"
    for content in (b"", gzip.compress(b""), gzip.compress(b"\xff" * 3000), b"\x1f\x8b" * 50):
        path.write_bytes(content)
        refused(lambda: TAR.verify(tmp_path))


def test_a_download_larger_than_the_set_is_broken_off(tmp_path: Path) -> None:
    """From a file: URL, which needs no server; Content-Length says how long it is."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with open(shelf / "small.tar.gz", "wb") as file:
        file.truncate(2**40)
    seen: list[int] = []
    online = ImageSet(**(vars(TAR) | {"url": f"file://{shelf}/"}))
    sentence = refused(lambda: fetch(online, tmp_path, lambda _, done, __: seen.append(done)))
    assert "larger than the canonical file" in sentence and not seen
    assert not list((tmp_path / "small").iterdir())


def test_a_batch_that_no_client_fills_costs_nothing() -> None:
    few = [ClientData(torch.zeros(n, 2)) for n in (3, 7)]
    assert cap_batch_size(10**15, few) == 7
    assert cap_batch_size(1024, few) == 1024  # as it always was, to the bit
    table: dict[str, Any] = {
        "model": "mlp",
        "method": {"name": "fedavg"},
        "data": {"validation_clients": 1, "test_clients": 1, "points": 20, "train_clients": 4},
        "server": {"rounds": 1, "cohort": 2},
    }
    found = []
    for engine in ("sequential", "batched"):
        for size in (20, 10**15):
            config = read_config(
                table | {"engine": {"name": engine}, "client": {"batch_size": size}}
            )
            simulation = Simulation(config)
            (state, _), *_ = simulation.rounds(simulation.initial_state())
            assert simulation.cost(state).train_flops < 10**9
            found.append(state.psi["1.weight"])
    assert (found[0] == found[1]).all() and (found[2] == found[3]).all()


def test_more_validation_clients_than_64_bits_of_points_are_one_sentence() -> None:
    settings = ["data.validation_clients=9223372036854775807", "data.overlap=false"]
    for more in (["data.train_clients=3"], ["data.train_clients=3", "data.classes_per_client=0"]):
        with pytest.raises(ConfigError, match=r"lower the number of clients or data\.points"):
            Simulation(load_config("digits", settings + more))
    with pytest.raises(ConfigError, match="memory"):
        Simulation(load_config("digits", ["data.overlap=true", "data.test_clients=10000000000"]))


def test_a_sentence_on_femnist_is_short_whatever_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "femnist").mkdir()
    stored = {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": ["a" * 9999], "y": [1]}}}
    (tmp_path / "femnist" / "all_data_0_niid.json").write_text(json.dumps(stored))
    refused(lambda: Femnist().load(tmp_path))


def test_a_cut_batch_has_the_same_points_in_each_half() -> None:
    for points in range(1, 12):
        size = cap_batch_size(10**6, [ClientData(torch.zeros(points, 1))])
        cut, whole = (
            batch_plan(Stream(3), 0, points, 2, b) for b in (size, ClientConfig().batch_size)
        )
        for a, b in zip(cut, whole, strict=True):
            halves = ((r[: (len(r) + 1) // 2], r[(len(r) + 1) // 2 :]) for r in (a, b))
            kept = [[h[h >= 0].tolist() for h in pair] for pair in halves]
            assert kept[0] == kept[1]
