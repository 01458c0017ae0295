"""Several real processes that share the work of a round."""

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import load_file

from flowdup import read_config, train_run

SETTINGS = [
    "--set=server.rounds=4",
    "--set=server.cohort=5",
    "--set=server.lr_decay_fraction=0.0",
    "--set=client.clip=0.1",
    "--set=data.train_clients=20",
    "--set=data.validation_clients=40",
    "--set=data.test_clients=5",
    "--set=run.evaluate_every=2",
    "--set=run.checkpoint_every=2",
]


def flowdup(processes: int, *arguments: str | Path) -> str:
    several = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    if processes == 1:
        done = forked.flowdup(*arguments)
    else:
        done = subprocess.run(
            [sys.executable, "-m", *several, "flowdup", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def psi(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = (folder / "checkpoint").glob("*.safetensors")
    return {n: t for n, t in load_file(path).items() if n.startswith("psi/")}


@pytest.mark.parametrize("method", ["flowdup", "fedprox"])
def test_two_processes_learn_what_one_learns(method: str, tmp_path: Path) -> None:
    chosen = [*SETTINGS, *([f"--set=method.name={method}"] if method != "flowdup" else [])]
    printed = {}
    for processes in (1, 2):
        out = tmp_path / str(processes)
        lines = flowdup(processes, "train", "digits", *chosen, "--out", out, "--json")
        printed[processes] = [json.loads(line) for line in lines.splitlines()]
    one, two = psi(tmp_path / "1"), psi(tmp_path / "2")
    assert max(float((one[n] - two[n]).abs().max()) for n in one) < 1e-6
    assert [m["round"] for m in printed[2]] == [1, 2, 3, 4]  # by one process only
    assert printed[1][-1]["validation_accuracy"] == pytest.approx(
        printed[2][-1]["validation_accuracy"], abs=0.2
    )


def test_two_processes_go_on_where_one_stopped_and_evaluate(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flowdup(1, "train", "digits", *SETTINGS, "--set=server.rounds=2", "--out", out)
    flowdup(2, "train", "digits", *SETTINGS, "--out", out, "--resume")
    whole = tmp_path / "whole"
    flowdup(1, "train", "digits", *SETTINGS, "--out", whole)
    one, two = psi(whole), psi(out)
    assert max(float((one[n] - two[n]).abs().max()) for n in one) < 1e-6
    found = json.loads(flowdup(2, "evaluate", out, "--json"))
    assert len(found["clients"]) == 5
    assert json.loads((out / "evaluation.json").read_text()) == found
    alone = json.loads(flowdup(1, "evaluate", out, "--json"))
    for a, b in zip(alone["clients"], found["clients"], strict=True):
        for reading, own in a["metrics"].items():  # the same logits, wherever they were made
            assert b["metrics"][reading] == pytest.approx(own, rel=1e-5)


def test_a_process_without_a_test_client_takes_part_in_an_evaluation(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flowdup(1, "train", "digits", *SETTINGS, "--set=data.test_clients=1", "--out", out)
    two, one = (json.loads(flowdup(n, "evaluate", out, "--json")) for n in (2, 1))
    assert two["metrics"] == one["metrics"]


SLOW_TO_READ = """
import json, os, signal, sys, time
from pathlib import Path
import flowdup

signal.alarm(40)  # processes that wait for each other in vain end, and so does the test

run, told = Path(sys.argv[1]), Path(sys.argv[2])
rank, waited = int(os.environ["RANK"]), []

def files():
    there = [run / name for name in ("config.toml", "clients.json", "metrics.jsonl")]
    return [(f.stat().st_ino, f.stat().st_mtime_ns) for f in there]

def slow(event, arguments):
    if event != "open" or waited:
        return
    name = Path(str(arguments[0])).name
    if rank == 0 and name.endswith(".safetensors"):
        waited.append(name)
        (told / "the main process has read").touch()
    elif rank == 1 and name == "checkpoint.json":
        waited.append(name)
        before, end = files(), time.monotonic() + 60
        while not (told / "the main process has read").exists() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(1)  # all that remains for the main process is to write a file
        answer = "as before" if files() == before else "changed"
        (told / "what the other process finds").write_text(answer)

sys.addaudithook(slow)
config = flowdup.read_config(json.loads(sys.argv[3]))
list(flowdup.train_run(config, run, resume=True))
"""


def test_nothing_is_written_before_every_process_has_read_what_is_continued(
    tmp_path: Path,
) -> None:
    """One of two processes is slow to read the checkpoint; the other may not go ahead."""
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SLOW_TO_READ)
    table = {
        "model": "mlp",
        "method": {"name": "fedavg"},
        "data": {"points": 20, "train_clients": 8, "validation_clients": 2, "test_clients": 2},
        "server": {"rounds": 1, "cohort": 2},
        "engine": {"device": "cpu"},
    }
    list(train_run(read_config(table), run))
    longer = json.dumps(table | {"server": {"rounds": 2, "cohort": 2}})
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", script, run, tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command), longer],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "what the other process finds").read_text() == "as before"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]
