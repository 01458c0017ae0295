"""Contenders do the same work in turns, so that a busy moment of the machine hits all alike.

Each has a process of its own, with its own threads and its own servers; only one works at a time.
One that is absent or fails is reported, and the others go on.  To compare with another checkout of
flowdup, each contender of flowdup's own is followed by a twin that runs that checkout's code.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from checkout import HERE, command, environment
from contenders.entry import Entry
from contenders.work import Work
from safetensors.torch import load_file

from flowdup.params import Params

Contenders = dict[str, tuple[str, str]]  # a module and its variant, by name
Result = dict[str, Any]
SIMULATORS: Contenders = {
    "flowdup": ("flowdup", ""),
    **{f"flowdup {engine}": ("flowdup", engine) for engine in ("sequential", "batched")},
    "pfl": ("pfl", ""),
    "flower actors": ("flower", "actors"),  # as many as cores, one thread each
    "flower threads": ("flower", "threads"),  # one actor with all threads
    "loop": ("loop", ""),
}
PERSONALIZERS: Contenders = {
    "h1 forward": ("personalize", "h1"),
    "prepared h1 forward": ("personalize", "h1-prepared"),  # run as a personalizer is
    "personalize": ("personalize", "weights"),
    "personalize, predict": ("personalize", "prediction"),
    "personalizer": ("personalize", "prepared"),
    "personalizer, predict": ("personalize", "prepared-prediction"),
    "Federation.personalize": ("personalize", "module"),
    "Federation.personalize, predict": ("personalize", "module-prediction"),
}
OWN = ("flowdup", "personalize")  # modules with code of flowdup's
BEFORE = ", before"  # ends a twin's name
ENDING = 60.0  # seconds that a dismissed contender, and the servers it has, take to end


@dataclass(frozen=True)
class Plan:
    threads: int = os.cpu_count() or 1
    warm_up: int = 2  # at least 2: something to compile in, and something to guess the pace from
    blocks: int = 7
    rounds: int = 1  # of a block, at most
    seconds: float = math.inf  # that a block should not exceed, though it has a round at least
    each: bool = True  # every round is timed; if not, every block, and divided by its rounds
    alone: bool = False  # a contender starts when the last has ended: no memory for all at once
    processes: int = 1  # of each contender, one after the other: some are faster than others

    @property
    def total(self) -> int:
        return self.warm_up + self.blocks * self.rounds


@dataclass(frozen=True)
class Match:
    work: Work
    contenders: Contenders = field(default_factory=lambda: SIMULATORS)
    plan: Plan = Plan()


class Player:
    """A contender's process."""

    def __init__(self, name: str, entry: Entry, log: Path, home: Path = HERE) -> None:
        self.name, self.entry, self.log = name, entry, log
        self.ms: list[float] = []  # per round, one number for each that was timed
        self.block = 1  # rounds
        self.first = 0.0  # ms of the first round, in which things are compiled, or found compiled
        hide = {"CUDA_VISIBLE_DEVICES": ""} if entry.device == "cpu" else {}
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                command(home, "contenders", entry.to_json()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(home) | hide | {"OMP_NUM_THREADS": str(entry.threads)},
                text=True,
            )
        self.about: Result = {}  # ready, absent or failed

    def __enter__(self) -> "Player":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.dismiss()
        try:
            self.process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def present(self) -> bool:
        return "ready" in self.about

    def dismiss(self) -> None:
        """Close the contender's input, whereupon it ends."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def prepare(self) -> None:
        self.about = self._read()

    def warm_up(self, plan: Plan) -> None:
        self.first = sum(self.run(1))
        if plan.warm_up > 2:
            self.run(plan.warm_up - 2)
        for ms in self.run(1):
            self.block = int(max(1, min(plan.rounds, plan.seconds * 1e3 / ms)))

    def run(self, rounds: int) -> list[float]:
        """Milliseconds; nothing from a contender that is not there."""
        if not self.present:
            return []
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"rounds": rounds}) + "\n")
            self.process.stdin.flush()
        reply = self._read()
        if "ms" not in reply:
            self.about = reply
        return reply.get("ms", [])

    def _read(self) -> Result:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        last = self.log.read_text().splitlines()[-30:]
        message: Result = json.loads(line) if line else {"failed": "".join(last[-1:]) or "killed"}
        if "failed" in message:
            print(f"{self.name} failed:", *last, sep="\n", file=sys.stderr)
        return message

    def psi(self) -> Params:
        return load_file(self.entry.psi) if Path(self.entry.psi).exists() else {}


def lineup(contenders: Contenders, against: Path | None) -> dict[str, tuple[str, str, Path]]:
    """Modules, variants and checkouts by name, twins next to each other."""
    found = {}
    for name, (module, variant) in contenders.items():
        found[name] = (module, variant, HERE)
        if against and module in OWN:
            found[name + BEFORE] = (module, variant, against)
    return found


def compete(title: str, match: Match, device: str, against: Path | None = None) -> list[Result]:
    plan, names = match.plan, lineup(match.contenders, against)
    players: list[Player] = []
    with TemporaryDirectory() as folder:
        for group in _groups(list(names), plan):
            with ExitStack() as stack:
                here: list[Player] = []
                for name in group:
                    number = len(players) + len(here)
                    module, variant, home = names[name]
                    entry = Entry(
                        module,
                        variant,
                        match.work,
                        device,
                        plan.threads,
                        plan.total,
                        plan.each,
                        str(Path(folder) / f"{number}.safetensors"),
                    )
                    player = Player(name, entry, Path(folder) / f"{number}.log", home)
                    here.append(stack.enter_context(player))
                _take_turns(here, plan)
                for player in here:
                    player.dismiss()  # all, before any is waited for
                players += here
        apart = distances(match.work, players)
    merged = _merge(players)
    together = [merged[name] for name in names]
    return [_result(title, player, together, apart) for player in together]


def _groups(names: list[str], plan: Plan) -> list[list[str]]:
    """Who is there at the same time; every other time they start in the opposite order."""
    groups: list[list[str]] = []
    for time in range(plan.processes):
        ordered = names[:: -1 if time % 2 else 1]
        groups += [[name] for name in ordered] if plan.alone else [ordered]
    return groups


def _merge(players: Sequence[Player]) -> dict[str, Player]:
    """The first process of every contender, with the times of all; one that failed, if one did."""
    merged: dict[str, Player] = {}
    for player in players:
        first = merged.setdefault(player.name, player)
        if not player.present:
            merged[player.name] = player
        elif first is not player:
            first.ms += player.ms
    return merged


def _take_turns(players: Sequence[Player], plan: Plan) -> None:
    for player in players:
        player.prepare()
    for player in players:
        player.warm_up(plan)
    for block in range(plan.blocks):
        for player in players[:: 1 if block % 2 else -1]:
            player.ms += player.run(player.block)


def distances(work: Work, players: Sequence[Player]) -> dict[str, float]:
    """How far everyone's psi is from the first's after the first round, in units of how far the
    first's has come: |psi - psi'| / |psi' - psi_0|, Euclidean.
    """
    found = {player.name: psi for player in players if (psi := player.psi())}
    if not found:
        return {}
    reference = found[next(iter(found))]
    moved = distance(reference, work.start(work.build()))
    return {name: distance(psi, reference) / (moved or math.nan) for name, psi in found.items()}


def distance(a: Params, b: Params) -> float:
    assert a.keys() == b.keys()
    return math.sqrt(sum((a[n].double() - b[n].double()).square().sum().item() for n in a))


def tolerance(entry: Entry) -> float:
    """The distance beyond which a contender did other work: more than its arithmetic explains."""
    if "bf16" in entry.variant:
        return 0.1
    return 1e-3 if entry.device == "cpu" else 0.02  # TF32


def _result(
    title: str, player: Player, players: Sequence[Player], apart: dict[str, float]
) -> Result:
    head = {"work": title, "contender": player.name}
    if not player.present:
        return head | {"ms_per_round": None, "ratio_to_pfl": None} | player.about
    middle, h1 = median(player.ms), _best(players, "h1 forward")
    pfl, flower = _best(players, "pfl"), _best(players, "flower")
    low, _, high = quantiles(player.ms, n=4)
    found: Result = {
        "ms_per_round": round(middle, 3),
        "ratio_to_pfl": pfl and round(pfl / middle, 3),
        "ratio_to_flower": flower and round(flower / middle, 3),
        "ratio_to_h1": h1 and round(middle / h1, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "rounds": len(player.ms) * (1 if player.entry.each else player.block),
        "first_round_s": round(player.first / 1e3, 2),
    }
    if before := [p.ms for p in players if p.present and p.name == player.name + BEFORE]:
        found["ratio_to_before"] = round(median(before[0]) / middle, 3)
    far = apart.get(player.name)
    if far is not None:
        found["distance"] = far if math.isfinite(far) else None
        if not far <= tolerance(player.entry):
            found["mismatch"] = f"psi is {far:.2g} of its way from {next(iter(apart))}'s"
    return head | found | player.about["ready"]


def _best(players: Sequence[Player], name: str) -> float | None:
    """The time of the fastest variant of a contender."""
    ours = [p for p in players if not p.name.endswith(BEFORE)]
    there = [p for p in ours if p.present and p.name.startswith(name)]
    return min((median(p.ms) for p in there), default=None)
