"""Contenders do the same work in turns, so that a busy moment of the machine hits all alike.

Each has a process of its own, with its own threads and its own servers; only one works at a time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from contenders.entry import Entry
from contenders.work import Work
from safetensors.torch import load_file

from flowdup.engines import ENGINES
from flowdup.params import Params

SIMULATORS = {
    "flowdup": ("flowdup", ""),
    **{f"flowdup {engine}": ("flowdup", engine) for engine in ENGINES},
    "pfl": ("pfl", ""),
    "flower actors": ("flower", "actors"),  # as many as cores, one thread each
    "flower threads": ("flower", "threads"),  # one actor with all threads
    "loop": ("loop", ""),
}
PERSONALIZERS = {
    "h1 forward": ("personalize", "h1"),
    "personalize": ("personalize", "weights"),
    "personalize, predict": ("personalize", "prediction"),
    "Federation.personalize": ("personalize", "module"),
    "Federation.personalize, predict": ("personalize", "module-prediction"),
}
TOLERANCE, MOVED = 1e-4, 1e-3  # how far apart psi may be after a round, how far it must have come
Result = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    device: str = "cpu"
    threads: int = os.cpu_count() or 1
    warm_up: int = 2
    blocks: int = 7
    rounds: int = 1  # of a block

    @property
    def total(self) -> int:
        return self.warm_up + self.blocks * self.rounds


class Player:
    """A contender's process."""

    def __init__(self, name: str, entry: Entry, log: Path) -> None:
        self.name, self.entry, self.log = name, entry, log
        self.ms: list[float] = []
        self.about: Result = {}
        here = str(Path(__file__).parent)
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        hide = {"CUDA_VISIBLE_DEVICES": ""} if entry.device == "cpu" else {}
        environment = (
            os.environ
            | hide
            | {
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": str(entry.threads),
            }
        )
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "contenders", entry.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )

    def __enter__(self) -> "Player":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.dismiss()
        self.process.wait()

    def dismiss(self) -> None:
        """Close the contender's input, whereupon it ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def prepare(self) -> bool:
        """Whether the contender is there."""
        self.about = self._read()
        return "absent" not in self.about

    def run(self, rounds: int) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"rounds": rounds}) + "\n")
        self.process.stdin.flush()
        ms: list[float] = self._read()["ms"]
        return ms

    def _read(self) -> Result:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = "\n".join(self.log.read_text().splitlines()[-30:])
            raise SystemExit(f"{self.name} failed:\n{last}")
        message: Result = json.loads(line)
        return message

    def psi(self) -> Params:
        return load_file(self.entry.psi) if Path(self.entry.psi).exists() else {}


def compete(
    title: str, work: Work, contenders: dict[str, tuple[str, str]], plan: Plan
) -> list[Result]:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        players = []
        for number, (name, (module, variant)) in enumerate(contenders.items()):
            psi = str(Path(folder) / f"{number}.safetensors")
            entry = Entry(module, variant, work, plan.device, plan.threads, plan.total, psi)
            player = Player(name, entry, Path(folder) / f"{number}.log")
            players.append(stack.enter_context(player))
        present = [player for player in players if player.prepare()]
        for player in present:
            player.run(plan.warm_up)
        apart = distances(work, present)
        for block in range(plan.blocks):
            for player in present[:: 1 if block % 2 else -1]:
                player.ms += player.run(plan.rounds)
        for player in players:
            player.dismiss()
        return [_result(title, player, present, apart) for player in players]


def distances(work: Work, players: Sequence[Player]) -> dict[str, float]:
    """How far everyone's psi is from the first's after the first round; refuses other work."""
    found = {player.name: psi for player in players if (psi := player.psi())}
    if not found:
        return {}
    reference = found[next(iter(found))]
    if distance(reference, work.start(work.build())) < MOVED:
        raise SystemExit("the first round moved nothing: there is nothing to compare")
    apart = {name: distance(psi, reference) for name, psi in found.items()}
    if far := [name for name, value in apart.items() if not value <= TOLERANCE]:
        raise SystemExit(f"{', '.join(far)} did other work than {next(iter(found))}: {apart}")
    return apart


def distance(a: Params, b: Params) -> float:
    assert a.keys() == b.keys()
    return max((a[n] - b[n]).abs().max().item() for n in a)


def _result(
    title: str, player: Player, present: Sequence[Player], apart: dict[str, float]
) -> Result:
    head = {"work": title, "contender": player.name}
    if not player.ms:
        return head | {"ms_per_round": None, "ratio_to_pfl": None} | player.about
    middle, h1 = median(player.ms), _best(present, "h1 forward")
    pfl, flower = _best(present, "pfl"), _best(present, "flower")
    low, _, high = quantiles(player.ms, n=4)
    return (
        head
        | {
            "ms_per_round": round(middle, 3),
            "ratio_to_pfl": pfl and round(pfl / middle, 3),
            "ratio_to_flower": flower and round(flower / middle, 3),
            "ratio_to_h1": h1 and round(middle / h1, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "rounds": len(player.ms),
            "distance": apart.get(player.name),
        }
        | player.about["ready"]
    )


def _best(players: Sequence[Player], name: str) -> float | None:
    """The time of the fastest variant of a contender."""
    return min((median(p.ms) for p in players if p.name.startswith(name)), default=None)
