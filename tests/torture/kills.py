"""Kills: at every point of a write, and at random moments."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flowdup.errors import FlowdupError
from torture.faults import Faults
from torture.runs import ROUNDS, Result, Work, fork, share, train, wait_for

_STOPPED_AT = 4  # a round between two checkpoints


def kills(works: list[Work], home: Path, wanted: int, processes: int) -> Result:
    """So many kills, two thirds of them at most inside writes; each run is resumed and compared."""
    first, last = works[0], works[-1]
    half_done = home / "half-done"
    _stop_after(first, half_done, _STOPPED_AT)
    starts = {"fresh": (first, None), "resumed": (first, half_done), "stages": (last, None)}
    points = [
        (name, point)
        for name, (work, start) in starts.items()
        for point in range(1, count_points(work, start, home / f"count-{name}") + 1)
    ]
    draw = random.Random(0)
    chosen = draw.sample(points, min(len(points), wanted * 2 // 3))
    cases: list[Callable[[], list[str]]] = []
    for name, point in chosen:
        work, start = starts[name]
        cases.append(partial(killed_at, work, home / f"kill-{name}-{point}", start, point))
    moments = wanted - len(chosen)
    for number in range(moments):
        work, when = works[number % len(works)], draw.random()
        folder = home / f"moment-{number}"
        cases.append(partial(_killed_after, work, folder, when))
    return {
        "kills": len(cases),
        "inside_writes": len(chosen),
        "points_of_writes": len(points),
        "at_random_moments": moments,
        "deviations": share(cases, processes),
    }


def _stop_after(work: Work, folder: Path, rounds: int) -> None:
    asked = iter(range(ROUNDS))
    code, told = wait_for(*fork(lambda: train(work.config, folder, lambda: next(asked) == rounds)))
    assert code == 0, told


def _begin(folder: Path, start: Path | None) -> None:
    if start is not None:
        shutil.copytree(start, folder)


def count_points(work: Work, start: Path | None, folder: Path) -> int:
    """How many points a run passes to its end."""
    _begin(folder, start)

    def counted() -> None:
        faults = Faults()
        faults.install()
        train(work.config, folder)
        raise FlowdupError(str(faults.passed))

    return int(wait_for(*fork(counted))[1])


def killed_at(work: Work, folder: Path, start: Path | None, point: int) -> list[str]:
    _begin(folder, start)

    def killed() -> None:
        Faults(point).install()
        train(work.config, folder)

    code, told = wait_for(*fork(killed))
    if code != -signal.SIGKILL:
        return [f"{folder.name} was not killed: {code} {told}"]
    return work.resumed(folder)


def _killed_after(work: Work, folder: Path, share: float) -> list[str]:
    """After a share of the time that the run takes; a shorter one if it has ended by then."""
    code = 0
    while code == 0:
        shutil.rmtree(folder, ignore_errors=True)
        pid, hear = fork(lambda: train(work.config, folder))
        time.sleep(share * work.seconds)
        os.kill(pid, signal.SIGKILL)
        code, told = wait_for(pid, hear)
        share *= 0.9
    if code != -signal.SIGKILL:
        return [f"{folder.name} was not killed: {code} {told}"]
    return work.resumed(folder)
