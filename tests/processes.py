"""What tests ask of processes that they started, and of the run folders of these."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file


def study(rounds: int, checkpoint_every: int) -> str:
    """A comparison of two small runs, `one` and `two`."""
    return (
        'model = "mlp"\n'
        "data = {points = 20, overlap = true, train_clients = 20, test_clients = 2}\n"
        'engine = {name = "batched", device = "cpu"}\n'
        f"server = {{rounds = {rounds}, cohort = 3}}\n"
        f"run = {{checkpoint_every = {checkpoint_every}, evaluate_every = 1000000}}\n"
        "[compare]\nseeds = [0]\n"
        '[compare.variants.one]\nmethod = {name = "fedavg"}\n'
        '[compare.variants.two]\nmethod = {name = "fedprox"}\n'
    )


def lines(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def tensors(run: Path, checkpoint: str = "checkpoint") -> dict[str, bytes]:
    (path,) = (run / checkpoint).glob("*.safetensors")
    return {name: t.numpy().tobytes() for name, t in load_file(path).items()}


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def workers(parent: int) -> list[int]:
    """Without the helper that Python starts to track what they share."""
    return [
        pid
        for pid in children(parent)
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
