"""Signals to every process of a `flowdup compare`, started as a person starts it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flowdup.config import Config
from flowdup.run import train_run
from flowdup.run.comparison import read_comparison
from torture.runs import Result, fork, tensors, wait_for

STUDY = (
    'model = "mlp"\n'
    "data = {points = 20, overlap = true, train_clients = 20, test_clients = 2}\n"
    'engine = {name = "batched", device = "cpu"}\n'
    "server = {rounds = 1500, cohort = 3}\n"
    "run = {checkpoint_every = 20, evaluate_every = 5000}\n"
    "[compare]\nseeds = [0]\n"
    '[compare.variants.one]\nmethod = {name = "fedavg"}\n'
    '[compare.variants.two]\nmethod = {name = "fedprox"}\n'
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
PARENT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def comparison(home: Path) -> Result:
    """One comparison that is interrupted again and again, then finished and compared."""
    study, out = home / "study.toml", home / "out"
    study.write_text(STUDY)
    jobs = read_comparison(str(study), out)
    found: list[str] = []
    cases = [(number, who) for number in SIGNALS for who in (*range(2), "parent", "all")]
    for number, who in cases:
        found += [f"{number.name} to {who}: {text}" for text in _signalled(study, out, number, who)]
    last = _start(study, out)
    _, told = last.communicate()
    if last.returncode:
        found.append(f"the comparison ended with {last.returncode} {told}")
    for job in jobs:
        alone = home / f"alone-{job.variant}"
        code, told = wait_for(*fork(partial(_train, job.config, alone)))
        if code or tensors(alone) != tensors(job.run.path):
            found.append(f"{job.variant}: other tensors {told}")
        rounds = [row["round"] for row in job.run.read_metrics()]
        if rounds != list(range(1, job.config.server.rounds + 1)):
            found.append(f"{job.variant}: other rounds in the metrics")
    return {"signals": len(cases), "deviations": found}


def _train(config: Config, folder: Path) -> None:
    for _ in train_run(config, folder):
        pass


def _start(study: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flowdup", "compare", str(study), "--out", str(out), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--jobs=2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _signalled(study: Path, out: Path, number: signal.Signals, who: int | str) -> list[str]:
    """A signal to "parent", "all" or one worker, once both runs have gone on for some rounds."""
    runs = [out / name / "seed-0" / "metrics.jsonl" for name in ("one", "two")]
    before = [_lines(run) for run in runs]
    process = _start(study, out)
    if not _until(lambda: all(_lines(r) > b + 5 for r, b in zip(runs, before, strict=True))):
        process.kill()
        return [f"no round in a minute: {process.communicate()[1]}"]
    workers = _workers(process.pid)
    targets = {"parent": [process.pid], "all": [*workers, process.pid]}
    for pid in [workers[who]] if isinstance(who, int) else targets[who]:
        os.kill(pid, number)
    expected = 1 if isinstance(who, int) else PARENT_CODES[number]
    if isinstance(who, int) and number == signal.SIGINT:  # a worker leaves it to its parent
        time.sleep(0.5)
        if process.poll() is not None:
            return ["it ended"]
        process.send_signal(signal.SIGTERM)
        expected = 143
    _, told = process.communicate()
    found = [] if process.returncode == expected else [f"exit code {process.returncode} {told}"]
    if "Traceback" in told:
        found.append(told)
    if not _until(lambda: not any(map(_alive, workers)), 10):
        found.append("a worker lives on")
    return found


def _until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def _lines(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _workers(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [
        int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
