"""A cohort in slots: clients side by side in one tensor program, one local step of all at once.

A slot takes its clients one after the other: the first step of a client begins anew from psi, its
last one adds what it changed to the cohort's sum.  So a step has the same shape however many points
clients have, and hardly any of its rows are empty.
"""

import heapq
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from flowdup import tree
from flowdup.accelerate.torch_private import zero_all
from flowdup.batches import Plan
from flowdup.client import ClientUpdate, Local, Step
from flowdup.methods import Batch, Params


class Schedule(NamedTuple):
    """What the slots do in every step; an idle one has no points and no progress."""

    points: NDArray[np.int64]  # [steps, slots, B], rows of a pool, -1: none
    progress: NDArray[
        np.int64
    ]  # [steps, slots, 2]: the client's steps before this one, and after; -1: idle


def schedule(plans: Sequence[Plan], first: Sequence[int], slots: int) -> Schedule:
    """Deal out clients with these batch plans [steps, B], long ones first, to the freest slot.

    `first` says in which row of a pool a client's points begin.
    """
    ends = [(0, slot) for slot in range(slots)]
    places: list[tuple[int, int]] = [(0, 0)] * len(plans)
    for i in sorted(range(len(plans)), key=lambda i: -len(plans[i])):
        end, slot = heapq.heappop(ends)
        places[i] = (end, slot)
        heapq.heappush(ends, (end + len(plans[i]), slot))
    length = max(end for end, _ in ends)
    points = np.full((length, slots, plans[0].shape[1]), -1, np.int64)
    progress = np.full((length, slots, 2), -1, np.int64)
    starts = np.zeros((length, slots, 1), np.int64)
    for (start, slot), plan, row in zip(places, plans, first, strict=True):
        own = slice(start, start + len(plan)), slot
        points[own], progress[own], starts[own] = plan, _progress(len(plan)), row
    return Schedule(np.where(points < 0, -1, points + starts), progress)


@cache
def _progress(steps: int) -> NDArray[np.int64]:
    return np.stack([np.arange(steps), np.arange(steps)[::-1]], 1)


class Slots(NamedTuple):
    """What clients have in hand between two steps, and the sums of those that are done."""

    local: Local  # [slots, ...]
    delta: Params  # the changes of all clients that are done
    loss: Tensor  # the sum of their mean objectives

    @classmethod
    def idle(cls, update: ClientUpdate, psi: Params, slots: int, steps: int) -> "Slots":
        """No client has begun; each will take so many steps at most."""
        local = update.begin(psi, steps)
        some = next(iter(psi.values()))
        return cls(
            tree.map(lambda t: t.new_zeros(slots, *t.shape), local),
            {n: torch.zeros_like(p) for n, p in psi.items()},
            some.new_zeros(()),
        )

    @property
    def width(self) -> int:
        """How many slots there are."""
        return next(iter(self.local.psi.dense.values())).shape[0]

    @property
    def steps(self) -> int:
        """How many of a client's steps have room among its factors; 0 where it has none."""
        return next((f.left.shape[1] for f in self.local.psi.factors.values()), 0)

    def can_hold(self, steps: int) -> bool:
        """Whether a client can take so many."""
        return not self.local.psi.factors or steps <= self.steps

    def clear(self) -> None:
        """Forget all clients, in place: those to come begin anew by themselves."""
        zero_all([*self.delta.values(), self.loss])


def advance(
    update: ClientUpdate,
    psi: Params,
    broadcast: Params,
    slots: Slots,
    batch: Batch,
    progress: Tensor,
) -> Slots:
    """One local step in every slot; batch [slots, B, ...], progress [slots, 2]."""
    before, after = progress.unbind(1)
    steps = torch.arange(slots.steps, device=progress.device)
    places = (before[:, None] == steps).to(slots.loss.dtype)
    fresh = update.begin(psi, slots.steps)
    local = tree.map(lambda new, old: _choose(before == 0, new, old), fresh, slots.local)

    def member(local: Local, batch: Batch, place: Tensor) -> Step:
        return update.step(psi | broadcast, local, batch, place)

    local, change, loss = vmap(member)(local, batch, places)
    delta, busy = dict(slots.delta), before >= 0
    for name, p in local.psi.dense.items():
        delta[name] = delta[name] + _choose(after == 0, p - psi[name], 0).sum(0)
    for name, (g, a) in change.items():
        delta[name] = delta[name] + _choose(busy, g, 0).T @ a
    mean = torch.where(busy, loss / (before + after + 1), 0).sum()
    return Slots(local, delta, slots.loss + mean)


def _choose(where: Tensor, a: Any, b: Any) -> Tensor:
    """By slot."""
    shape = (a if isinstance(b, int) else b).ndim - 1
    return torch.where(where.reshape(-1, *(1 for _ in range(shape))), a, b)


def slots_needed(steps: Sequence[int], limit: int) -> int:
    """So many that they all end at about the time of the longest client; `limit` 0: none."""
    needed = -(-sum(steps) // max(steps))
    return min(needed, limit) if limit else needed
