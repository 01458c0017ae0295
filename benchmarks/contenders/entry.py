"""What a contender is told, and how it keeps pace with whoever starts it."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

import torch
from safetensors.torch import save_file

from contenders.work import Work
from flowdup.params import Params


@dataclass(frozen=True)
class Entry:
    module: str
    variant: str = ""
    work: Work = field(default_factory=Work)
    device: str = "cpu"
    threads: int = 1
    rounds: int = 0  # the most that will be asked for
    each: bool = True  # time every round, else blocks of rounds
    psi: str = ""  # a file for the weights after the first round

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Entry":
        table = json.loads(text)
        work = table["work"]
        return cls(**table | {"work": Work(**work | {"shape": tuple(work["shape"])})})


class Pace:
    """Times rounds in blocks; between blocks a contender stands still, inside its own loop.

    Lines of JSON: {"ready": ...}, then for every {"rounds": n} that comes in {"ms": [...]}, the
    milliseconds of each round or, if only the block is timed, those of its mean round.  What a GPU
    still has to do belongs to what is timed.  When nothing more will come, the contender ends.
    """

    def __init__(self, entry: Entry, replies: TextIO, about: dict[str, Any]) -> None:
        self.entry, self.replies, self.about = entry, replies, about
        self.ms: list[float] = []
        self.left, self.first = 0, True
        self.timed, self.start = 0, 0.0  # rounds since the clock was started

    def ready(self, **versions: str) -> None:
        self.about["versions"] |= versions
        self._say({"ready": self.about})
        self._wait()

    def __call__(self, psi: Callable[[], Params] | None = None) -> None:
        """A round is over; psi() would give its result."""
        self.left -= 1
        self.timed += 1
        if self.entry.each or not self.left:
            if self.entry.device != "cpu":
                torch.cuda.synchronize()
            self.ms.append(1e3 * (time.perf_counter() - self.start) / self.timed)
        if self.first and psi is not None:
            save_file({n: p.cpu().clone() for n, p in psi().items()}, self.entry.psi)
        self.first = False
        if not self.left:
            self._say({"ms": self.ms})
            self._wait()
        elif self.entry.each:
            self._start()

    def _say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self.replies, flush=True)

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self.ms, self.left = [], json.loads(line)["rounds"]
        self._start()

    def _start(self) -> None:
        self.timed, self.start = 0, time.perf_counter()
