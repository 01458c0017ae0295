"""One writer per run folder: a lock that the system frees when its process ends, however it ends.

Only training holds it.  Evaluations, figures and reports beside a training write files of their
own, each replaced as a whole, and read a checkpoint that is whole at any moment.
"""

import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from flowdup.errors import FolderInUseError
from flowdup.files import cannot_write, remove_stale_temporaries, try_lock
from flowdup.run.folder import RunFolder


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold a run folder, made if need be, as its only writer; FolderInUseError if there is one.

    Where files cannot be locked (some network filesystems) there is a warning and no lock.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise cannot_write(folder.lock, error) from error
    try:
        _take(descriptor, folder)
        for inside in (folder.path, folder.checkpoint, folder.best):
            if inside.is_dir() and not os.access(inside, os.W_OK | os.X_OK):
                raise cannot_write(inside, PermissionError(0, "it is read-only"))
            remove_stale_temporaries(inside)
        yield
    finally:
        os.close(descriptor)  # which frees the lock


def _take(descriptor: int, folder: RunFolder) -> None:
    try:
        free = try_lock(descriptor)
    except OSError as error:
        warnings.warn(
            f"{folder.path} cannot be locked ({error.strerror}): start no second training into it",
            stacklevel=5,
        )
        return
    if not free:
        raise FolderInUseError(
            f"{folder.path} is being trained into by process {_holder(folder)}: wait for it, stop "
            "it, or choose another folder"
        )
    holder = f"{os.getpid()} on {socket.gethostname()}\n".encode()
    try:
        os.write(descriptor, holder)
        os.ftruncate(descriptor, len(holder))  # last: at no time is there no name in it
    except OSError as error:
        raise cannot_write(folder.lock, error) from error


def _holder(folder: RunFolder) -> str:
    """Which process has the lock; it may be about to write its name for the first time."""
    for _ in range(20):
        name = folder.lock.read_text(errors="replace").partition("\n")[0]
        if name:
            return name
        time.sleep(0.01)
    return "(unknown)"
