"""Files that are either the old or the new one, never half of either, and locks on them."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flowdup.errors import FlowdupError


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file by new content, durably; on any failure the old file stays as it was.

    The content is first in a file `.NAME.RANDOM.tmp` beside it, locked while it is written; those
    that killed writers of this path left are deleted.
    """
    if not path.name or path.is_dir():
        raise FlowdupError(f"'{path}' is a folder: give a file name")
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        raise FlowdupError(f"'{path}' is a device or the like, not a file: give a file name")
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_own_temporaries(path)
        file, temporary = _open_temporary(path)
        with file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            if temporary:
                temporary.unlink()
        raise cannot_write(path, error) from error


def _open_temporary(path: Path) -> tuple[BinaryIO, Path]:
    """A new file beside a path, locked where files can be."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115  (for the caller to close)
        with contextlib.suppress(OSError):  # without locks nobody sweeps either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file, temporary
        file.close()  # it was swept before it was locked


def remove_stale_temporaries(folder: Path) -> None:
    """Delete what killed writers left: temporary files that nobody holds locked."""
    for path in folder.glob(".*.tmp"):
        _remove_unlocked(path)


def _remove_own_temporaries(path: Path) -> None:
    """The same for one path alone: its folder may be anybody's."""
    temporary = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")
    with contextlib.suppress(OSError):  # a folder may be writable and not readable
        for name in filter(temporary.fullmatch, os.listdir(path.parent)):
            _remove_unlocked(path.with_name(name))


def _remove_unlocked(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "rb") as file:  # it may be gone by now
        if try_lock(file.fileno()):
            path.unlink()


def try_lock(descriptor: int) -> bool:
    """Lock an open file against all others without waiting; False if one of them has the lock.

    Closing the file, or the end of the process, frees it.  OSError where files cannot be locked:
    on some network filesystems.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Have a folder, made if need be, to oneself: others that ask for the same wait.

    Where folders cannot be locked, on some network filesystems, nobody waits.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which frees it


def sync_file(path: Path) -> None:
    """Wait until what was written to a file is on the disk."""
    _sync(path, os.O_RDWR)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> FlowdupError:
    """The error that a file could not be written, with a remedy."""
    return FlowdupError(
        f"could not write {path}: {error.strerror or error}. Free space or choose another folder; "
        "what was there before is intact"
    )
