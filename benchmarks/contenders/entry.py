"""What a contender is told, and how it keeps pace with whoever starts it."""

import json
import math
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

    Lines of JSON: {"ready": ...}, then for every {"rounds": n} that comes in {"ms": [n numbers]}.
    When nothing more will come, the contender ends.
    """

    def __init__(self, entry: Entry, replies: TextIO, about: dict[str, Any]) -> None:
        self.entry, self.replies, self.about = entry, replies, about
        self.ms: list[float] = []
        self.block, self.done, self.start = math.inf, 0, 0.0

    def ready(self, **versions: str) -> None:
        self.about["versions"] |= versions
        self._say({"ready": self.about})
        self._wait()

    def __call__(self, psi: Callable[[], Params] | None = None) -> None:
        """A round is over; psi() would give its result."""
        if self.entry.device != "cpu":
            torch.cuda.synchronize()
        self.ms.append(1e3 * (time.perf_counter() - self.start))
        self.done += 1
        if self.done == 1 and psi is not None:
            save_file({n: p.cpu().contiguous() for n, p in psi().items()}, self.entry.psi)
        if len(self.ms) == self.block:
            self._say({"ms": self.ms})
            self._wait()
        self.start = time.perf_counter()

    def _say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self.replies, flush=True)

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self.ms, self.block = [], json.loads(line)["rounds"]
        self.start = time.perf_counter()
