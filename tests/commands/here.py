"""Commands run in this process, where a Python of their own each would only cost time."""

import io
import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from unittest.mock import patch

from flowdup.cli import main


class Ended(NamedTuple):
    code: int
    out: str
    error: str


def flowdup(*words: str | Path) -> Ended:
    out, error = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        code = _run(*words)
    return Ended(code, out.getvalue(), error.getvalue())


def flowdup_on_terminal(*words: str | Path) -> Ended:
    """With a terminal for stderr, 120 columns wide."""
    out, seen = io.StringIO(), bytearray()
    with _terminal(seen), redirect_stdout(out):
        code = _run(*words)
    return Ended(code, out.getvalue(), seen.decode())


@contextmanager
def _terminal(seen: bytearray) -> Iterator[None]:
    ours, theirs = pty.openpty()

    def read() -> None:
        try:
            while content := os.read(ours, 65536):
                seen.extend(content)
        except OSError:  # the other end is closed
            return

    reader = Thread(target=read)
    reader.start()
    settings = {"TERM": "xterm-256color", "COLUMNS": "120"}
    with patch.dict(os.environ, settings), open(theirs, "w") as file, redirect_stderr(file):
        yield
    reader.join()
    os.close(ours)


def _run(*words: str | Path) -> int:
    with patch.object(sys, "argv", ["flowdup", *map(str, words)]):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0
