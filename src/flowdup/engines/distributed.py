"""Several processes, on one machine or many: each runs its share of a cohort (`torchrun`).

Every process knows psi and the clients, draws the same cohort and takes the same server step, so
one all-reduce of the reply is all that they say to each other in a round.
"""

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from flowdup.aggregation import total
from flowdup.engines.base import Engine, SupportQuery
from flowdup.messages import Reply, Task
from flowdup.methods import Params
from flowdup.params import pack, unpack


def is_distributed() -> bool:
    """Whether this process was started by torchrun as one of several."""
    return dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1


def is_main_process() -> bool:
    """Whether this process is the one that writes."""
    return not is_distributed() or int(os.environ["RANK"]) == 0


def connect_processes(device: torch.device) -> None:
    """Let the processes of torchrun find each other, once; they can then wait for each other."""
    if is_distributed() and not dist.is_initialized():
        with _stdout_as_stderr():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_disconnect)


def _disconnect() -> None:
    """End the threads of the group: one that outlives Python aborts a process that is done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Wait until all processes are here; alone, nothing happens."""
    if is_distributed():
        dist.barrier()


def any_process(flag: bool) -> bool:
    """Whether it is so in one of the processes at least; all must ask, and get the same answer."""
    if not is_distributed():
        return flag
    result = torch.tensor([int(flag)])
    dist.all_reduce(result, dist.ReduceOp.MAX, group=_host_group())
    return bool(result.item())


@cache
def _host_group() -> dist.ProcessGroup | None:
    """All processes, to talk without a GPU, which would have to be waited for."""
    if dist.get_backend() == "gloo":
        return None  # the default group
    with _stdout_as_stderr():
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


class DistributedEngine:
    """An engine for this process's share, and the sum over all processes."""

    def __init__(self, engine: Engine, device: torch.device, dtype: torch.dtype) -> None:
        self.engine, self.device, self.dtype = engine, device, dtype
        self.roster = engine.roster
        connect_processes(device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def train(self, task: Task) -> Iterator[Reply]:
        """One reply, the sum of all; its points and rows are those of this process's share."""
        share = dict(list(task.cohort.items())[self.rank :: self.size])
        zeros = {n: torch.zeros_like(p) for n, p in task.psi.items()}
        reply = Reply(
            task.round, zeros, torch.zeros((), device=self.device, dtype=self.dtype), 0, 1
        )
        if share:
            reply = total(self.engine.train(replace(task, cohort=share)))
        sums = {n: reply.delta[n] for n in task.psi} | {"loss of all": reply.loss}
        vector = pack(sums)
        dist.all_reduce(vector)
        sums = unpack(vector, sums)
        loss = sums.pop("loss of all")
        yield replace(reply, delta=sums, loss=loss, clients=len(task.cohort))

    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
        """Every process does its share of the pairs, and all get all logits."""
        if not pairs:
            return []
        mine = range(self.rank, len(pairs), self.size)
        # a process without a share works on one pair too: it must know how many classes there are
        found = self.engine.logits(params, [pairs[i] for i in mine or [0]])
        sizes = [p.query.shape[0] for p in pairs]
        together = torch.zeros(sum(sizes), found[0].shape[1], dtype=self.dtype, device=self.device)
        places = torch.split(together, sizes)
        for i, own in zip(mine, found, strict=False):
            places[i].copy_(own)
        dist.all_reduce(together)
        return list(torch.split(together.cpu(), sizes))


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """What Gloo in torch 2.9 prints when it connects must not stand among a command's output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
