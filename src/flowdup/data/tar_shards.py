"""Clients in tar files as WebDataset writes them: `000.png` and `000.cls` make one point.

Images are read from the tar file one by one; nothing is unpacked to disk.
"""

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from flowdup.data.client_groups import Unnamed
from flowdup.data.clients import ClientData
from flowdup.data.image_files import Image, ImageReader, find_folders, is_image
from flowdup.errors import DataError, shorten

SUFFIXES = (".tar", ".tar.gz", ".tgz")
_LONGEST_LABEL = 1000  # bytes


class _Shard(NamedTuple):
    images: dict[str, tarfile.TarInfo]  # by point, in the order of the file
    labels: dict[str, str]


def is_tar(path: Path) -> bool:
    """Whether a file's name says that it is a tar archive; hidden files are none."""
    return path.name.lower().endswith(SUFFIXES) and not path.name.startswith(".")


def find_tar_clients(folder: Path) -> dict[str, list[Path]]:
    """A client's shards by its name: `client.tar`, or a folder `client/*.tar`."""
    found = {_stem(path): [path] for path in _tars(folder)}
    for inside in find_folders(folder):
        if shards := _tars(inside):
            if inside.name in found:
                raise DataError(
                    f"client '{inside.name}' of {folder} is a tar file and a folder: keep one"
                )
            found[inside.name] = shards
    return dict(sorted(found.items()))


def read_tar_client(name: str, paths: Sequence[Path], reader: ImageReader) -> Unnamed:
    """A client from its shards; a point without a .cls has no label."""
    x, shards = _read_images(paths, reader)
    texts = [s.labels.get(key, "") for s in shards for key in s.images]
    return Unnamed(ClientData(x, name=name), texts if any(texts) else None)


def read_tar_images(path: Path, reader: ImageReader) -> tuple[Tensor, list[str]]:
    """The images of a tar file, and their names in it."""
    x, (shard,) = _read_images([path], reader)
    return x, [member.name for member in shard.images.values()]


def _read_images(paths: Sequence[Path], reader: ImageReader) -> tuple[Tensor, list[_Shard]]:
    shards = {path: _read_shard(path) for path in paths}
    count = sum(len(shard.images) for shard in shards.values())
    if not count:
        raise DataError(f"{paths[0]} has no images: store 000.png, perhaps with 000.cls, and so on")
    return reader.read(_open_images(shards), count), [*shards.values()]


def _read_shard(path: Path) -> _Shard:
    shard = _Shard({}, {})
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = Path(member.name)
                if not member.isreg() or file.name.startswith("."):
                    continue
                key = str(file.parent / file.name.partition(".")[0])
                if is_image(file):
                    if shard.images.setdefault(key, member) is not member:
                        raise DataError(f"{path} has two images '{shorten(key)}': name them apart")
                elif file.suffix == ".cls" and (content := archive.extractfile(member)):
                    shard.labels[key] = content.read(_LONGEST_LABEL).decode().strip()
    except DataError:
        raise
    except Exception as error:  # damage surfaces as anything from TarError to zlib.error
        raise _unreadable(path, error) from error
    return shard


def _open_images(shards: dict[Path, _Shard]) -> Iterator[Image]:
    for path, shard in shards.items():
        with tarfile.open(path) as archive:
            for member in shard.images.values():
                file = archive.extractfile(member)
                if file is None:  # only of what is no regular file, and these are not here
                    raise _unreadable(path, "a member is no file")
                with file:
                    yield f"{member.name} of {path}", file


def _unreadable(path: Path, why: object) -> DataError:
    return DataError(f"{path} is no readable tar file ({shorten(why, 200)}): write it again")


def _tars(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_tar(path) and path.is_file())


def _stem(path: Path) -> str:
    end = next(end for end in sorted(SUFFIXES, key=len)[::-1] if path.name.lower().endswith(end))
    return path.name[: -len(end)]
