"""A coordinator killed with -9 at any moment goes on to the same bits."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from nearby import NearbyFederation

from flowdup.checkpoint import load_checkpoint

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
torch.set_num_threads(1)
from nearby import NearbyFederation
near = NearbyFederation(Path(sys.argv[2]))
print("ready", flush=True)
print(near.train(near.nodes()))
"""


def begin(root: Path) -> subprocess.Popen[str]:
    """A whole federation in another process."""
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, here, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def bits(run: Path) -> dict[str, bytes]:
    return {n: t.numpy().tobytes() for n, t in load_checkpoint(run / "checkpoint")[1].psi.items()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("unbroken")
    NearbyFederation(root)
    assert begin(root).wait(120) == 0
    return bits(root / "federation" / "run")


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 5])
def test_a_kill_at_any_moment(tmp_path: Path, unbroken: dict[str, bytes], moment: int) -> None:
    near = NearbyFederation(tmp_path)
    process = begin(tmp_path)
    metrics, until = near.run / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < moment:
        assert time.monotonic() < until
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert load_checkpoint(near.run / "checkpoint")[1].round < 6 or moment == 5
    assert begin(tmp_path).wait(120) == 0
    assert bits(near.run) == unbroken
