"""Cases for a user's own clients: folders of images, CSV files, tar shards, tables of images."""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from flowdup.data import ClientData, DataConfig, InputSpec
from flowdup.data.given_clients import read_given_clients
from flowdup.data.user_data import read_folder, read_inputs, read_table
from fuzz.bench import Bench
from fuzz.mutations import change_bytes, change_text

NAMES = ("cat", "dog")
CSV = "a,b,label,site\n1,2.5,cat,north\n-3,4e3,dog,north\n0,1,,north\n"
_ODD_KINDS = (
    *(("PNG", "L"), ("PNG", "I;16"), ("PNG", "P"), ("PNG", "RGBA"), ("JPEG", "CMYK")),
    *(("GIF", "P"), ("BMP", "RGB"), ("TIFF", "F"), ("WEBP", "RGB"), ("PNG", "1")),
)
_ODD_CELLS = (
    "",
    "nan",
    "inf",
    "-1",
    "1e400",
    "9" * 5000,
    '"',
    "\0",
    "é",
    "cat",
    "2**3",
    "0x1",
    "-",
)
_ODD_NAMES = ("..", ".hidden.png", "a b.png", "é.png", "x.PNG", "x.tar", "x.csv", "x.npz", "train")


def picture(number: int, kind: str = "PNG", mode: str = "RGB", side: int = 8) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def _odd_picture(random: Random) -> bytes:
    """One of another kind, mode or size, or with bytes changed."""
    kind, mode = random.choice(_ODD_KINDS)
    if mode in ("I;16", "F"):
        pixels: Any = np.zeros((8, 8), np.uint16 if mode == "I;16" else np.float32)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, kind)
        content = buffer.getvalue()
    else:
        content = picture(9, kind, mode, random.choice((8, 8, 1, 9)))
    return content if random.randrange(3) == 0 else change_bytes(random, content)


def image_folders(random: Random, bench: Bench) -> None:
    """client/class/*.png, where one file or folder is odd."""
    folder = bench.fresh("clients")
    for number in range(6):
        end = ("png", "jpg")[number % 2]
        path = folder / ("al", "bo")[number // 3] / NAMES[number % 2] / f"{number}.{end}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, "PNG" if end == "png" else "JPEG"))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    one, how = random.choice(files), random.randrange(5)
    if how < 2:
        one.write_bytes(_odd_picture(random))
    elif how == 2:
        one.write_bytes(change_bytes(random, one.read_bytes()))
    elif how == 3:
        place = random.choice((folder, one.parent, one.parent.parent, one.parent / "deep"))
        place.mkdir(exist_ok=True)
        name = random.choice(_ODD_NAMES)
        if name != "..":
            one.rename(place / name)
    else:
        one.unlink()
        one.symlink_to(random.choice((one, folder, folder / "nowhere", Path("/dev/null"))))
    _read(random, folder, [folder, folder / "al", one])


def csv_files(random: Random, bench: Bench) -> None:
    """One file per client, or a table of all of them."""
    folder = bench.fresh("clients")
    folder.mkdir()
    rows = [line.split(",") for line in CSV.splitlines()]
    for _ in range(random.choice((0, 1, 1, 3))):
        row = random.choice(rows)
        row[random.randrange(len(row))] = random.choice(_ODD_CELLS)
    if random.randrange(4) == 0:
        random.choice(rows).append("more")
    sign = random.choice((",", ",", ";", "\t"))
    text = "\n".join(sign.join(row) for row in rows) + "\n"
    text = change_text(random, text) if random.randrange(3) == 0 else text
    content = text.encode(random.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16")), "replace")
    content = change_bytes(random, content) if random.randrange(3) == 0 else content
    (folder / "al.csv").write_text(CSV)
    (folder / "bo.csv").write_bytes(content)
    _read(random, folder, [folder / "bo.csv"], tables=[folder / "bo.csv", folder])


def tar_shards(random: Random, bench: Bench) -> None:
    """A client's images in a tar file that is changed, or made with odd members."""
    folder = bench.fresh("clients")
    folder.mkdir()
    for name in ("al", "bo"):
        members: list[tuple[str, bytes]] = []
        for number in range(3):
            members.append((f"{number}.png", picture(number)))
            members.append((f"{number}.cls", NAMES[number % 2].encode()))
        if name == "bo" and random.randrange(2):
            place = random.randrange(len(members))
            odd = (_odd_picture(random), b"", b"\xff\xfe", b"9" * 5000, b"1.5", b"-1", b"cat\ndog")
            member = random.choice(("0.png", "0.cls", "a/0.png", "../0.png", "/0.png", "x.json"))
            members[place] = (random.choice((members[place][0], member)), random.choice(odd))
        packed = random.choice(("", "gz"))
        end = "tar.gz" if packed else "tar"
        path = folder / f"{name}.{end}"
        with tarfile.open(path, f"w:{packed}") as archive:  # type: ignore[call-overload]
            for member, content in members:
                entry = tarfile.TarInfo(member)
                entry.size = len(content)
                if name == "bo" and random.randrange(20) == 0:
                    entry.type, entry.linkname = random.choice((b"1", b"2", b"5", b"6")), "0.png"
                    entry.size = 0
                archive.addfile(entry, io.BytesIO(content))
    if random.randrange(2):
        path.write_bytes(change_bytes(random, path.read_bytes()))
    _read(random, folder, [path])


def image_tables(random: Random, bench: Bench) -> None:
    """Hugging Face's Image column: encoded bytes with or without a path, and names of classes."""
    folder = bench.fresh("clients")
    folder.mkdir()
    images: list[Any] = [{"bytes": picture(i), "path": None} for i in range(4)]
    for _ in range(random.choice((0, 1, 1, 2))):
        odd = (_odd_picture(random), b"", None)
        images[random.randrange(4)] = random.choice(
            (None, {"bytes": random.choice(odd), "path": random.choice((None, "", "/etc/passwd"))})
        )
    names: Any = random.choice((list(NAMES), [], ["cat"], None, ["cat", 1], "cat", ["cat"] * 2))
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    about = json.dumps({"info": {"features": random.choice((features, {}, [], None))}})
    labels: Any = random.choice(([0, 1, 1, None], [0, 1, 2, -5], [None] * 4, ["a", "b", "", "a"]))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"client": ["al", "al", "bo", "bo"], "label": labels, "x": pa.array(images, kind)}
    table = pa.table(columns)
    head = random.choice((about, about, about, change_text(random, about), "{"))
    table = table.replace_schema_metadata({b"huggingface": head.encode(errors="replace")})
    path = folder / random.choice(("data.parquet", "data.arrow"))
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
    if random.randrange(3) == 0:
        path.write_bytes(change_bytes(random, path.read_bytes()))
    _read(random, folder, [], tables=[path, folder])


def _read(
    random: Random, folder: Path, inputs: Sequence[Path], tables: Sequence[Path] = ()
) -> None:
    """As training, as personalising or as evaluating would have it read."""
    specs = [InputSpec((c, 8, 8), "uint8", 2, class_names=NAMES) for c in (1, 3)]
    spec = random.choice([*specs, InputSpec((2,), "float32", 2, class_names=NAMES)])
    how = random.randrange(3)
    if how == 0 and inputs:
        read_inputs(random.choice(inputs), spec.shape)
    elif how == 1:
        given = random.choice([folder, *inputs, *tables])
        read_given_clients(given, DataConfig(), spec, random.choice(("", "", "test")))
    elif tables and random.randrange(2):
        _check(read_table(random.choice(tables), "client", "label", ("x",)))
    else:
        _check(read_folder(folder))


def _check(groups: dict[str, list[ClientData]]) -> None:
    for client in (client for members in groups.values() for client in members):
        dtype = "uint8" if str(client.x.dtype) == "torch.uint8" else "float32"
        InputSpec(tuple(client.x.shape[1:]), dtype, 4).check(client)
