"""Small runs in forked processes: torch is imported once, a whole run takes a tenth of a second."""

import gc
import json
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from processes import tensors
from small import METHODS, population
from staged import staged

from flowdup import read_config, train_run
from flowdup.config import Config
from flowdup.errors import FlowdupError
from flowdup.run import RunFolder

ROUNDS = 8
Outcome = tuple[int, str]  # 0; 2 and flowdup's sentence; 3 and a traceback; or minus a signal
Result = dict[str, Any]


def configuration(method: str, engine: str, rounds: int = ROUNDS) -> Config:
    return read_config(
        {
            "model": "mlp",
            "method": METHODS[method],
            "client": {"batch_size": 10},
            "server": {"rounds": rounds, "cohort": 3},
            "run": {"checkpoint_every": 3, "evaluate_every": 4},
            "engine": {"name": engine, "device": "cpu"},
        }
    )


def contents(folder: Path) -> dict[str, dict[str, bytes]]:
    """The tensors of a run's checkpoints."""
    return {f.name: tensors(folder, f.name) for f in folder.iterdir() if f.is_dir()}


def rows_of(run: RunFolder) -> list[dict[str, Any]]:
    """Of the metrics, what is the same in every run."""
    return [{n: v for n, v in row.items() if n != "seconds"} for row in run.read_metrics()]


def train(config: Config, folder: Path, stop: Callable[[], bool] | None = None) -> None:
    for _ in train_run(config, folder, resume=True, population=population(), stop=stop):
        pass


@dataclass(frozen=True)
class Work:
    """A run, what it gives when nobody disturbs it, and how long that takes."""

    name: str
    config: Config
    tensors: dict[str, dict[str, bytes]]  # of its checkpoints
    rows: list[dict[str, Any]]  # of its metrics
    seconds: float

    def deviations(self, folder: Path) -> list[str]:
        """What of a finished run is not as it should be; the folder goes if all is well."""
        run, found = RunFolder(folder), list[str]()
        if contents(folder) != self.tensors:
            found.append("other tensors")
        if run.count_rounds() != len(self.rows) or rows_of(run) != self.rows:
            found.append("other metrics")
        if any(folder.rglob("*.tmp")):
            found.append("a temporary file is left")
        if any(len(list(f.iterdir())) != 2 for f in folder.iterdir() if f.is_dir()):
            found.append("more than one checkpoint")
        if not found:
            shutil.rmtree(folder)
        return [f"{folder.name}, {self.name}: {text}" for text in found]

    def resumed(self, folder: Path) -> list[str]:
        """The deviations after the run went on to its end, undisturbed."""
        code, told = wait_for(*fork(lambda: train(self.config, folder)))
        if code:
            return [f"{folder.name}, {self.name}: resuming gave {code} {told}"]
        return self.deviations(folder)


def prepare(home: Path) -> list[Work]:
    """Everything is imported and run once here, so that forked processes find it warm."""
    made = []
    for engine, method in (
        ("batched", "fedavg"),
        ("batched", "flowdup"),
        ("sequential", "fedprox"),
    ):
        config = configuration(method, engine)
        made.append(undisturbed(f"{method} ({engine})", config, home / f"{engine}-{method}"))
    made.append(undisturbed("stages", staged(), home / "stages"))
    return made


def undisturbed(name: str, config: Config, folder: Path) -> Work:
    """A run from its beginning to its end; afterwards this process may fork."""
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    for _ in range(2):  # the second time warm
        shutil.rmtree(folder, ignore_errors=True)
        start = time.monotonic()
        train(config, folder)
    seconds = time.monotonic() - start
    gc.collect()
    while threading.active_count() > 1:
        time.sleep(0.01)
    return Work(name, config, contents(folder), rows_of(RunFolder(folder)), seconds)


def fork(work: Callable[[], object]) -> tuple[int, int]:
    """A process that does the work and ends, and the end of a pipe from which to hear of it."""
    hear, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        return pid, hear
    code, told = 3, ""
    try:
        os.close(hear)
        work()
        code = 0
    except FlowdupError as error:
        code, told = 2, str(error)
    except BaseException:
        told = traceback.format_exc()
    finally:
        os.write(tell, told.encode()[:60_000])
        os._exit(code)


def wait_for(pid: int, hear: int) -> Outcome:
    with os.fdopen(hear, "rb") as file:
        told = file.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told


def share(cases: Sequence[Callable[[], list[str]]], processes: int) -> list[str]:
    """The deviations of all cases, done in some processes at a time."""
    lanes = []
    for lane in range(processes):
        mine = cases[lane::processes]

        def work(mine: Sequence[Callable[[], list[str]]] = mine) -> None:
            raise FlowdupError(json.dumps([text for case in mine for text in case()][:20]))

        lanes.append(fork(work))
    found: list[str] = []
    for pid, hear in lanes:
        code, told = wait_for(pid, hear)
        found += json.loads(told) if code == 2 else [f"a process of the torture ended: {told}"]
    return found


def shorter(work: Work, rounds: int) -> Config:
    return replace(work.config, server=replace(work.config.server, rounds=rounds))
