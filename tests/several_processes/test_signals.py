"""Commands that are asked to stop, and processes that are killed, as a person has them."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from processes import alive, children, lines, study, tensors, until, workers

from flowdup import load_config, train_run

SETTINGS = [
    "--set=model=mlp",
    "--set=server.cohort=4",
    "--set=server.lr_decay_fraction=0.0",
    "--set=data.train_clients=20",
    "--set=data.validation_clients=40",
    "--set=data.test_clients=2",
    "--set=run.evaluate_every=1000000",
    "--set=run.checkpoint_every=1000000",
]
SLOW = ["--set=client.epochs=100000", "--set=engine.name=sequential"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}


def start(*words: object, processes: int = 1) -> subprocess.Popen[str]:
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    several = torchrun if processes > 1 else []
    return subprocess.Popen(
        [sys.executable, "-m", *several, "flowdup", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def saved_round(run: Path) -> int:
    found: int = json.loads((run / "checkpoint" / "checkpoint.json").read_text())["round"]
    return found


def test_a_signal_ends_a_run_after_its_round_saved_and_to_be_resumed(tmp_path: Path) -> None:
    """By the line that is printed; the second time by it, too.  Then to the same bits."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    words = ["train", "digits", *SETTINGS, "--set=server.rounds=1000000", "--out", str(out)]
    for number in (signal.SIGTERM, signal.SIGINT):
        before = lines(out)
        process = start(*words)
        until(lambda before=before: lines(out) >= before + 2)  # type: ignore[misc]
        process.send_signal(number)
        _, told = process.communicate()
        assert process.returncode == 128 + number, told
        assert "Traceback" not in told and f"stopped by {number.name} and saved; to go on:" in told
        assert saved_round(out) == lines(out) >= before + 2
        assert (out / "report.html").exists()
        python, *flowdup, command = shlex.split(told.splitlines()[-1])[:4]
        assert [python, *flowdup, command] == ["python", "-m", "flowdup", "train"]
        words = shlex.split(told.splitlines()[-1])[3:]
        assert words.count("--resume") == 1
    last = saved_round(out) + 2
    config = load_config("digits", [*(s.removeprefix("--set=") for s in SETTINGS)])
    config = replace(config, server=replace(config.server, rounds=last))
    assert len(list(train_run(config, out, resume=True))) == 2
    list(train_run(config, whole))
    assert tensors(whole) == tensors(out)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_after_a_signal_ends_a_run_at_once(
    tmp_path: Path, first: signal.Signals
) -> None:
    """A round takes a long time here."""
    out = tmp_path / "run"
    process = start("train", "digits", *SETTINGS, *SLOW, "--out", out)
    until((out / "metrics.jsonl").exists)
    time.sleep(0.5)
    process.send_signal(first)
    assert process.stderr is not None
    while "finishing the round in hand" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # which torchrun adds
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    try:
        _, told = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in told
    assert saved_round(out) == 0


def test_a_signal_ends_all_processes_of_torchrun_after_one_round(tmp_path: Path) -> None:
    """Sent to one of them that does not write."""
    out = tmp_path / "run"
    process = start(
        "train", "digits", *SETTINGS, "--set=server.rounds=1000000", "--out", out, processes=2
    )
    until(lambda: lines(out) >= 2)
    ranks = {rank(pid): pid for pid in children(process.pid) if rank(pid)}
    os.kill(ranks["1"], signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert saved_round(out) == lines(out) >= 2
    assert "torchrun --nproc-per-node=2 -m flowdup train digits" in told and "--resume" in told
    assert not any(alive(pid) for pid in ranks.values())


SIGNALLED = """
import os, signal
real = signal.signal
def receive_and_send(number, handler):  # the earliest signal that does not end the process at once
    before = real(number, handler)
    if number == signal.SIGTERM and callable(handler) and os.environ.get("RANK", "1") == "1":
        signal.signal = real
        signal.raise_signal(number)
    return before
signal.signal = receive_and_send
"""


def test_a_signal_to_one_process_of_torchrun_before_the_first_round_ends_all_as_stopped(
    tmp_path: Path,
) -> None:
    """The one that writes has neither a signal nor metrics then."""
    out, module = tmp_path / "run", tmp_path / "signalled.py"
    module.write_text(SIGNALLED)
    words = ["train", "digits", *SETTINGS, "--set=server.rounds=5", "--out", out]
    process = start("--import", module, *words, processes=2)
    _, told = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "stopped by SIGTERM and saved; to go on:" in told, told
    assert saved_round(out) == lines(out) == 0


def test_a_signal_while_a_finished_run_is_resumed_ends_it_as_finished(tmp_path: Path) -> None:
    """There is nothing to go on with."""
    out, module = tmp_path / "run", tmp_path / "signalled.py"
    module.write_text(SIGNALLED)
    words = ["train", "digits", *SETTINGS, "--set=server.rounds=1", "--out", out]
    for more, received in (([], False), (["--resume"], True)):
        process = start(*(["--import", module] if received else []), *words, *more)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 0 and "to go on" not in told, told
        assert ("finishing the round in hand" in told) == received
    assert saved_round(out) == lines(out) == 1


def rank(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = (v.partition(b"=")[2].decode() for v in variables if v.startswith(b"RANK="))
    return next(found, "")


def compare(
    folder: Path, *more: str, rounds: int = 2
) -> tuple[subprocess.Popen[str], list[int], list[Path]]:
    """One whose two workers have trained some rounds."""
    (folder / "study.toml").write_text(study(rounds=1_000_000, checkpoint_every=1_000_000))
    words = [folder / "study.toml", "--out", folder / "out", "--jobs=2", "--json", *more]
    process = start("compare", *words)
    runs = [folder / "out" / name / "seed-0" for name in ("one", "two")]
    until(lambda: all((r / "metrics.jsonl").exists() and lines(r) >= rounds for r in runs))
    found = workers(process.pid)
    assert len(found) == 2
    return process, found, runs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_comparison_with_every_run_saved(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As a terminal, systemd and Slurm send it: to all processes, in whatever order."""
    process, pids, runs = compare(tmp_path)
    for pid in (*pids, process.pid):
        os.kill(pid, number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in told, told
    again = shlex.split(told.strip().splitlines()[-1])
    assert again[2:5] == ["flowdup", "compare", str(tmp_path / "study.toml")]
    assert all(saved_round(run) == lines(run) >= 2 for run in runs)
    assert not any(map(alive, pids))


def test_workers_end_with_a_comparison_that_is_killed(tmp_path: Path) -> None:
    """Though they are in the middle of a long round."""
    process, pids, _ = compare(tmp_path, *SLOW, rounds=0)
    time.sleep(1)  # for the rounds to begin
    process.kill()
    process.wait()
    try:
        until(lambda: not any(map(alive, pids)), 10)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_a_worker_that_is_killed_is_one_sentence_and_the_others_are_saved(tmp_path: Path) -> None:
    process, pids, runs = compare(tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert told.startswith("error: ") and told.count("\n") == 1, told
    (gone,) = [run for run in runs if f"variant '{run.parent.name}' with seed 0 was killed" in told]
    (other,) = [run for run in runs if run != gone]
    assert saved_round(other) == lines(other) >= 2
    assert saved_round(gone) == 0
    assert not any(map(alive, pids))
