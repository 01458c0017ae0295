"""Downloading public image sets from their official places."""

import http.client
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

from flowdup.data.images import ImageSet
from flowdup.data.sources import Source
from flowdup.errors import DataError

Progress = Callable[[str, int, int | None], None]  # file name, bytes done, bytes in all if known

_BLOCK = 1 << 18
_SLACK = 2**20  # bytes that a packed file may have beyond its parts
_TIMEOUT = 30  # seconds without a byte


def fetch(source: Source, folder: Path, progress: Progress) -> Path:
    """Download what the set still lacks, and say where it lies, verified.

    A file appears in the folder once it is complete and has the right hash; a failed download
    leaves nothing behind and raises DataError.  Good files that are there are not fetched again.
    A set that cannot be downloaded has to be there; if it is not, DataError says how to get it.
    """
    if isinstance(source, ImageSet) and source.url:
        with suppress(DataError):
            return source.verify(folder)
        for name in source.downloads:
            target = folder / source.places[0] / name
            if not _good(source, target):
                _download(source, target, progress)
    return source.verify(folder)


def _good(source: ImageSet, file: Path) -> bool:
    try:
        return file.is_file() and bool(source.read_parts(file))
    except DataError:
        return False


def _download(source: ImageSet, target: Path, progress: Progress) -> None:
    url = source.url + target.name
    by_hand = f"download it by hand and put it in {target.parent}"
    most = sum(part.size for part in source.parts) + _SLACK  # packed, it is smaller
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            partial = Path(folder) / target.name
            with partial.open("wb") as file:
                for block, total in _blocks(url, by_hand, most):
                    file.write(block)
                    progress(target.name, file.tell(), total)
            if not _good(source, partial):
                raise DataError(
                    f"{url} is not the canonical file and was not kept: try later, or {by_hand}"
                )
            os.replace(partial, target)
    except OSError as error:
        raise DataError(
            f"{target} cannot be written ({error}): make room or mend its permissions, "
            "or set FLOWDUP_DATA to another folder"
        ) from error


def _blocks(url: str, by_hand: str, most: int) -> Iterator[tuple[bytes, int | None]]:
    """The bytes at a URL, and how many there are in all; trouble on the network is a DataError."""
    done = 0
    try:
        with urlopen(url, timeout=_TIMEOUT) as response:
            length = response.headers.get("Content-Length")
            total = int(length) if length else None
            while (total or 0) <= most and (block := response.read(_BLOCK)):
                done += len(block)
                if done > most:
                    break
                yield block, total
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(
            f"{url} cannot be downloaded ({error}): check the connection, or {by_hand}"
        ) from error
    if max(done, total or 0) > most:
        raise DataError(
            f"{url} is larger than the canonical file and was not kept: try later, or {by_hand}"
        )
    if total is not None and done < total:
        raise DataError(
            f"{url} broke off after {done:,} of {total:,} bytes: try again, or {by_hand}"
        )
