"""Several processes, on one machine or many: each runs its share of a cohort (`torchrun`).

Every process knows psi and the clients, draws the same cohort and takes the same server step, so
one all-reduce of the update is all that they say to each other in a round.
"""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flowdup.data.clients import ClientData
from flowdup.engines.base import Cohort, CohortUpdate, Engine, SupportQuery
from flowdup.methods import Params
from flowdup.random import Stream


def several() -> bool:
    """Whether this process was started by torchrun as one of several."""
    return dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1


def leads() -> bool:
    """Whether this process is the one that writes."""
    return not several() or int(os.environ["RANK"]) == 0


def wait_for_all() -> None:
    if several():
        dist.barrier()


class DistributedEngine:
    """An engine for this process's share, and the sum over all processes.

    `padding` is that of the share.
    """

    def __init__(self, engine: Engine, device: torch.device, dtype: torch.dtype) -> None:
        self.engine, self.device, self.dtype = engine, device, dtype
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def train(
        self,
        params: Params,
        clients: Sequence[ClientData],
        cohort: Cohort,
        orders: Stream,
        told: Params,
    ) -> CohortUpdate:
        share = dict(list(cohort.items())[self.rank :: self.size])
        zero = torch.zeros((), device=self.device, dtype=self.dtype)
        update = CohortUpdate({n: torch.zeros_like(p) for n, p in params.items()}, zero, 0.0)
        if share:
            update = self.engine.train(params, clients, share, orders, told)
        weight = len(share) / len(cohort)
        together = torch.cat(
            [(weight * d).reshape(-1) for d in [*update.delta.values(), update.loss]]
        )
        dist.all_reduce(together)
        *deltas, loss = torch.split(together, [*(p.numel() for p in params.values()), 1])
        delta = {n: d.view_as(params[n]) for n, d in zip(params, deltas, strict=True)}
        return CohortUpdate(delta, loss.reshape(()), update.padding)

    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
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
