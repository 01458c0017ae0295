"""Clients side by side: a cohort dealt out to lanes, and one local step of all lanes at once.

A lane takes its clients one after the other: the first step of a client begins anew from psi, its
last one adds what it changed to the cohort's total.  So a step has the same shape however many
points clients have, and hardly any of its rows are empty.
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
from flowdup.client import ClientConfig, Local, Step, begin, local_step
from flowdup.methods import Batch, Objective, Params


class Schedule(NamedTuple):
    """What the lanes do in every step.  An idle lane has no points and stands at -1."""

    points: NDArray[np.int64]  # [steps, lanes, B], rows of a pool, -1: none
    marks: NDArray[np.int64]  # [steps, lanes, 2]: steps of the client before this one, and after


def schedule(plans: Sequence[NDArray[np.int64]], first: Sequence[int], lanes: int) -> Schedule:
    """Deal out clients with these batch plans [steps, B], long ones first, to the freest lane.

    `first` says in which row of a pool a client's points begin.
    """
    ends = [(0, lane) for lane in range(lanes)]
    places: list[tuple[int, int]] = [(0, 0)] * len(plans)
    for i in sorted(range(len(plans)), key=lambda i: -len(plans[i])):
        end, lane = heapq.heappop(ends)
        places[i] = (end, lane)
        heapq.heappush(ends, (end + len(plans[i]), lane))
    length = max(end for end, _ in ends)
    points = np.full((length, lanes, plans[0].shape[1]), -1, np.int64)
    marks = np.full((length, lanes, 2), -1, np.int64)
    starts = np.zeros((length, lanes, 1), np.int64)
    for (start, lane), plan, row in zip(places, plans, first, strict=True):
        own = slice(start, start + len(plan)), lane
        points[own], marks[own], starts[own] = plan, _marks(len(plan)), row
    return Schedule(np.where(points < 0, -1, points + starts), marks)


@cache
def _marks(steps: int) -> NDArray[np.int64]:
    return np.stack([np.arange(steps), np.arange(steps)[::-1]], 1)


class Lanes(NamedTuple):
    local: Local  # [lanes, ...]
    total: Params  # the changes of all clients that are done
    loss: Tensor  # the sum of their mean objectives

    @classmethod
    def idle(
        cls, method: Objective, config: ClientConfig, psi: Params, lanes: int, steps: int
    ) -> "Lanes":
        """No client has begun; each will take so many steps at most."""
        local = begin(method, config, psi, steps)
        some = next(iter(psi.values()))
        return cls(
            tree.map(lambda t: t.new_zeros(lanes, *t.shape), local),
            {n: torch.zeros_like(p) for n, p in psi.items()},
            some.new_zeros(()),
        )

    @property
    def width(self) -> int:
        return next(iter(self.local.dense.values())).shape[0]

    @property
    def steps(self) -> int:
        """How many of a client's steps have room among its factors; 0 where it has none."""
        return next((f.left.shape[1] for f in self.local.factors.values()), 0)

    def hold(self, steps: int) -> bool:
        """Whether a client can take so many."""
        return not self.local.factors or steps <= self.steps

    def clear(self) -> None:
        """Forget all clients, in place: those to come begin anew by themselves."""
        zero_all([*self.total.values(), self.loss])


def advance(
    method: Objective,
    config: ClientConfig,
    psi: Params,
    told: Params,
    lanes: Lanes,
    batch: Batch,
    marks: Tensor,
) -> Lanes:
    """One local step in every lane; batch [lanes, B, ...], marks [lanes, 2]."""
    before, after = marks.unbind(1)
    steps = torch.arange(lanes.steps, device=marks.device)
    places = (before[:, None] == steps).to(lanes.loss.dtype)
    fresh = begin(method, config, psi, lanes.steps)
    local = tree.map(lambda new, old: _choose(before == 0, new, old), fresh, lanes.local)

    def member(local: Local, batch: Batch, place: Tensor) -> Step:
        return local_step(method, config, psi | told, local, batch, place)

    local, change, loss = vmap(member)(local, batch, places)
    total, busy = dict(lanes.total), before >= 0
    for name, p in local.dense.items():
        total[name] = total[name] + _choose(after == 0, p - psi[name], 0).sum(0)
    for name, (g, a) in change.items():
        total[name] = total[name] + _choose(busy, g, 0).T @ a
    mean = torch.where(busy, loss / (before + after + 1), 0).sum()
    return Lanes(local, total, lanes.loss + mean)


def _choose(where: Tensor, a: Any, b: Any) -> Tensor:
    """By lane."""
    shape = (a if isinstance(b, int) else b).ndim - 1
    return torch.where(where.reshape(-1, *(1 for _ in range(shape))), a, b)


def lanes_needed(steps: Sequence[int], limit: int) -> int:
    """So many that they all end at about the time of the longest client; `limit` 0: none."""
    needed = -(-sum(steps) // max(steps))
    return min(needed, limit) if limit else needed
