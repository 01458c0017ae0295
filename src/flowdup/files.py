"""Files that are either the old or the new one, never half of either."""

import contextlib
import os
from pathlib import Path

from flowdup.errors import FlowdupError


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file by new content, durably; on any failure the old file stays as it was."""
    if not path.name:
        raise FlowdupError(f"'{path}' is a folder: give a file name")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> FlowdupError:
    return FlowdupError(
        f"could not write {path}: {error.strerror or error}. Free space or choose another folder; "
        "what was there before is intact"
    )
