"""Points at which a process that writes can be killed: before, inside and after what it asks of
the system.

Only in processes of the torture; nothing in flowdup knows of it.
"""

import builtins
import os
import signal
from collections.abc import Callable
from typing import Any

ASKED = ("open", "write", "fsync", "ftruncate", "replace", "unlink", "mkdir")


class Faults:
    """Counts the points that a process passes, and kills it at one of them."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.passed = at, 0

    def install(self) -> None:
        for name in ASKED:
            setattr(os, name, self._surrounded(getattr(os, name)))
        real = builtins.open

        def watched_open(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
            opened = real(file, mode, *more, **options)
            return opened if set(mode) <= {"r", "b", "t"} else _File(opened, self)

        builtins.open = watched_open

    def pass_point(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _surrounded(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*arguments: Any, **options: Any) -> Any:
            self.pass_point()
            answer = ask(*arguments, **options)
            self.pass_point()
            return answer

        return asked


class _File:
    """A file that may be killed with half of its content written."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def write(self, content: Any) -> int:
        half = len(content) // 2
        for part in (content[:half], content[half:]):
            self._faults.pass_point()
            self._file.write(part)
            self._file.flush()
        self._faults.pass_point()
        return len(content)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
