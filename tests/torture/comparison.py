"""Signals to every process of a `flowdup compare`, started as a person starts it."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from processes import alive, lines, study, tensors, until, workers

from flowdup.config import Config
from flowdup.run import train_run
from flowdup.run.comparison import read_comparison
from torture.runs import Result, fork, wait_for

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
PARENT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def comparison(home: Path) -> Result:
    """One comparison that is interrupted again and again, then finished and compared."""
    path, out = home / "study.toml", home / "out"
    path.write_text(study(rounds=1500, checkpoint_every=20))
    jobs = read_comparison(str(path), out)
    found: list[str] = []
    cases = [(number, who) for number in SIGNALS for who in (*range(2), "parent", "all")]
    for number, who in cases:
        found += [f"{number.name} to {who}: {text}" for text in _signalled(path, out, number, who)]
    last = _start(path, out)
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


def _start(path: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flowdup", "compare", str(path), "--out", str(out), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--jobs=2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _signalled(path: Path, out: Path, number: signal.Signals, who: int | str) -> list[str]:
    """A signal to "parent", "all" or one worker, once both runs have gone on for some rounds."""
    runs = [out / name / "seed-0" for name in ("one", "two")]
    before = [lines(run) for run in runs]
    process = _start(path, out)
    try:
        until(lambda: all(lines(r) > b + 5 for r, b in zip(runs, before, strict=True)))
    except AssertionError:
        process.kill()
        return [f"no round in a minute: {process.communicate()[1]}"]
    pids = workers(process.pid)
    targets = {"parent": [process.pid], "all": [*pids, process.pid]}
    for pid in [pids[who]] if isinstance(who, int) else targets[who]:
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
    try:
        until(lambda: not any(map(alive, pids)), 10)
    except AssertionError:
        found.append("a worker lives on")
    return found
