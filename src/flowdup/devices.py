"""Devices by name: what a setting or a caller says, as a `torch.device` that exists here."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from flowdup.errors import ConfigError, GpuMemoryError


def parse_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N; auto is a GPU if there is one, under torchrun one per process."""
    if name == "auto":
        return torch.device(f"cuda:{_local_rank()}" if torch.cuda.is_available() else "cpu")
    known = ["cpu", "cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name not in known:
        raise ConfigError(f"unknown device '{name}': use auto, {', '.join(known)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available: use the device cpu")
    return torch.device(name)


def gpu_is_full(what: str = "this") -> GpuMemoryError:
    """What to say when torch finds no memory; `what` begins the sentence."""
    sentence = f"{what} does not fit in the GPU's memory"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        others = max(0, total - free - torch.cuda.memory_reserved())
        sentence += f", of which other processes hold {others / total:.0%}"
    return GpuMemoryError(
        f"{sentence}: run fewer processes beside it, lower client.batch_size or choose a smaller "
        "model"
    )


@contextmanager
def one_core() -> Iterator[None]:
    """Operations of this thread on one core; threads that an engine has made keep theirs.

    Where several cores share a small operation, they wait for each other at its end, and if another
    process has one of them, for that process: rounds have taken thirty times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _local_rank() -> int:
    """Of this process among those that torchrun started on this machine."""
    return int(os.environ["LOCAL_RANK"]) if dist.is_torchelastic_launched() else 0
