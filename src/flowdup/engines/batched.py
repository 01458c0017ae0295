"""The whole cohort as one tensor program: `vmap` of ClientUpdate's steps over lanes of clients.

On a GPU the clients' points stay there, a step is compiled and replayed (`program.py`), and the
host never waits for it.  The result is the reference engine's up to rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from flowdup.client import ClientConfig, batch_plans
from flowdup.data.clients import ClientData
from flowdup.engines.base import Cohort, CohortUpdate, SupportQuery, longest
from flowdup.engines.joined import Joined
from flowdup.engines.lanes import Lanes, advance, lanes_needed, schedule
from flowdup.engines.pool import Pool, size
from flowdup.engines.program import Captured, Eager
from flowdup.errors import TrainingError
from flowdup.methods import Batch, Method, Params
from flowdup.random import Stream

_POINTS = 10_000  # that go through personalised models at once
_SHARE = 0.25  # of a GPU's free memory, which clients' points may take for good

Plans = list[NDArray[np.int64]]
Fixed = tuple[Params, Params]  # psi, and what the server tells besides
Inputs = tuple[Tensor | Batch, Tensor]


class Resident(NamedTuple):
    """What is known of all clients, so that programs last for every cohort."""

    clients: Sequence[ClientData]
    pool: Pool | None  # None: there are too many points, or clients are made when asked for
    longest: int  # the most points that one of them has, 0: unknown


class BatchedEngine:
    def __init__(
        self,
        method: Method,
        config: ClientConfig,
        device: torch.device,
        dtype: torch.dtype,
        clients_at_once: int = 0,  # 0: as many as fit
        compiled: bool = False,
    ) -> None:
        self.method, self.config, self.device, self.dtype = method, config, device, dtype
        self.clients_at_once, self.compiled = clients_at_once, compiled
        self.resident = Resident((), None, 0)
        self.captured: Captured[Lanes] | None = None
        self.joined: Joined  # of psi, once a round brings it

    def train(
        self,
        params: Params,
        clients: Sequence[ClientData],
        cohort: Cohort,
        orders: Stream,
        told: Params,
    ) -> CohortUpdate:
        members = {number: clients[number] for number in cohort.values()}
        pool = self._pool(clients, members)
        points = {lane: len(members[number]) for lane, number in cohort.items()}
        plans = list(batch_plans(orders, self.config, points).values())
        first = [pool.first[number] for number in cohort.values()]
        self.joined = Joined(self.method, params)
        lanes, rows = self._run(plans, first, pool, (self.joined.join(params), told))
        mean = torch._foreach_div([*lanes.total.values(), lanes.loss], len(cohort))
        found = self.joined.split(dict(zip(lanes.total, mean, strict=False)))
        delta = {n: found[n] for n in params}
        padding = 1 - self.config.epochs * sum(points.values()) / rows
        return CohortUpdate(delta, mean[-1], padding)

    def _pool(self, clients: Sequence[ClientData], members: Mapping[int, ClientData]) -> Pool:
        if clients is not self.resident.clients:
            self.resident, self.captured = self._settle(clients), None  # which has the old pool
        return self.resident.pool or Pool.of(members, self.device)

    def _settle(self, clients: Sequence[ClientData]) -> Resident:
        if self.device.type != "cuda" or not isinstance(clients, list):
            return Resident(clients, None, longest(clients))
        free, _ = torch.cuda.mem_get_info(self.device)
        fits = size(clients) <= _SHARE * free
        pool = Pool.of(dict(enumerate(clients)), self.device) if fits else None
        return Resident(clients, pool, longest(clients))

    def _run(self, plans: Plans, first: list[int], pool: Pool, fixed: Fixed) -> tuple[Lanes, int]:
        """All clients' steps, in half as many lanes where they do not fit in memory."""
        count = lanes_needed(list(map(len, plans)), self.clients_at_once)
        while True:
            try:
                return self._run_in(count, plans, first, pool, fixed)
            except torch.OutOfMemoryError as error:
                self.captured = None
                torch.cuda.empty_cache()
                if count == 1:
                    raise TrainingError(
                        "one client alone does not fit in the GPU's memory: lower "
                        "client.batch_size or choose a smaller model"
                    ) from error
                self.clients_at_once = count = -(-count // 2)

    def _run_in(
        self, count: int, plans: Plans, first: list[int], pool: Pool, fixed: Fixed
    ) -> tuple[Lanes, int]:
        steps = max(map(len, plans))
        if self.captured and self.captured.state.hold(steps):
            count = self.captured.state.width
        dealt = schedule(plans, first, count)
        points, marks = (self._send(torch.from_numpy(part)).unbind() for part in dealt)
        stays = pool is self.resident.pool
        program: Eager[Lanes] | Captured[Lanes] | None = None
        for rows, mark in zip(points, marks, strict=True):
            inputs = rows if stays else pool.batch(rows, self.dtype), mark
            program = program or self._program(fixed, count, steps, inputs)
            program(*inputs)
        assert program is not None
        return program.state, dealt.points.size

    def _send(self, numbers: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return numbers
        return numbers.pin_memory().to(self.device, non_blocking=True)

    def _program(
        self, fixed: Fixed, count: int, steps: int, inputs: Inputs
    ) -> Eager[Lanes] | Captured[Lanes]:
        """One that is ready for a round."""

        def idle(steps: int) -> Lanes:
            return Lanes.idle(self.joined, self.config, fixed[0], count, steps)

        if not self.compiled:
            return Eager(self._step, fixed, idle(steps))
        if self.captured is None or not self.captured.state.hold(steps):
            self.captured = None
            most = self.config.epochs * -(-self.resident.longest // self.config.batch_size)
            self.captured = Captured(self._step, fixed, idle(max(steps, most)), *inputs)
        self.captured.begin(fixed)
        self.captured.state.clear()
        return self.captured

    def _step(self, fixed: Fixed, lanes: Lanes, points: Tensor | Batch, marks: Tensor) -> Lanes:
        """`points` are rows of the pool that stays, or a batch of another."""
        if isinstance(points, Tensor):
            assert self.resident.pool is not None
            points = self.resident.pool.batch(points, self.dtype)
        return advance(self.joined, self.config, *fixed, lanes, points, marks)

    @torch.no_grad()
    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
        def own(support: Tensor, present: Tensor, query: Tensor) -> Tensor:
            weights = self.method.personalize(params, support, present)
            return self.method.f(weights, query)

        logits: dict[int, Tensor] = {}
        sizes = [p.support.shape[0] + p.query.shape[0] for p in pairs]
        for members in _by_size(sizes, self.clients_at_once):
            group = [pairs[i] for i in members]
            present = _pad([torch.ones(p.support.shape[0], dtype=self.dtype) for p in group])
            inputs = (_pad([p.support for p in group]), present, _pad([p.query for p in group]))
            found = vmap(own)(*(t.to(self.device) for t in inputs)).cpu()
            for i, padded in zip(members, found, strict=True):
                logits[i] = padded[: pairs[i].query.shape[0]]
        return [logits[i] for i in range(len(pairs))]


def _by_size(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices in groups of like size, the largest first, `limit` members at most (0: no limit) and
    no more points, padding counted, than go through at once.
    """
    group: list[int] = []
    for i in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        if group and (len(group) == limit or sizes[group[0]] * (len(group) + 1) > _POINTS):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _pad(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors that differ in their first dimension; zeros fill the rest."""
    longest = max(part.shape[0] for part in parts)
    out = parts[0].new_zeros((len(parts), longest, *parts[0].shape[1:]))
    for row, part in zip(out, parts, strict=True):
        row[: part.shape[0]] = part
    return out
