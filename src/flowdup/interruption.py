"""SIGINT and SIGTERM as a question that a loop asks.  For programs: a library leaves signals be."""

import os
import shlex
import signal
import sys
from types import FrameType
from typing import Any, NoReturn, Self

_STOPPING = "\nfinishing the round in hand and saving it; press Ctrl-C again to stop at once\n"


class Interruption:
    """Whether the process was asked to stop: `stop()` is true after SIGINT or SIGTERM.

    Signals keep their usual effect until the first question, so that what is not yet in a loop that
    asks ends at once; and again after the `with` block.  A SIGINT after the first signal raises
    KeyboardInterrupt, another one ends the process; a further SIGTERM, which torchrun sends to the
    others when one process ends, changes nothing.
    """

    def __init__(self, verbose: bool = True) -> None:
        self.signal: int | None = None
        self.verbose = verbose
        self.before: dict[int, Any] = {}

    def __call__(self) -> bool:
        if not self.before:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._receive)
        return self.signal is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def end_program(self, *more: str) -> NoReturn:
        """Say how to go on, with the given command and perhaps more words, and exit.

        Of several processes another one may have had the signal; torchrun ends them by SIGTERM.
        """
        number = self.signal or signal.SIGTERM
        program = ["flowdup"]
        if "TORCHELASTIC_RUN_ID" in os.environ:
            processes = os.environ["LOCAL_WORLD_SIZE"]
            program = ["torchrun", f"--nproc-per-node={processes}", "-m", "flowdup"]
        elif sys.argv[0].endswith("__main__.py"):
            program = ["python", "-m", "flowdup"]
        words = [*program, *sys.argv[1:], *(word for word in more if word not in sys.argv)]
        if self.verbose:
            name = signal.Signals(number).name
            print(f"stopped by {name} and saved; to go on:\n{shlex.join(words)}", file=sys.stderr)
        sys.exit(128 + number)  # as a shell calls it

    def _receive(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = number
            if self.verbose:
                os.write(2, _STOPPING.encode())  # print may be what was interrupted
