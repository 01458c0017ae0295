"""The reference engine: one client after the other, only its last batch padded.

On a CPU as many clients run at a time as torch has threads, each on one of them: small convolutions
on one core each are faster than one on all cores, and the bits do not depend on how many there are.
"""

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from flowdup.client import ClientConfig, LocalStep, Update, begin, client_update, local_step
from flowdup.data.clients import ClientData
from flowdup.engines.base import (
    Cohort,
    CohortUpdate,
    SupportQuery,
    local_batches,
    longest,
    on_device,
)
from flowdup.engines.program import Traced
from flowdup.methods import Batch, Method, Params
from flowdup.random import Stream
from flowdup.rank_one import Factors

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # in malloc.h

Item = TypeVar("Item")
Result = TypeVar("Result")


class SequentialEngine:
    def __init__(
        self,
        method: Method,
        config: ClientConfig,
        device: torch.device,
        dtype: torch.dtype,
        tracing: bool = True,
    ) -> None:
        self.method, self.config, self.device, self.dtype = method, config, device, dtype
        self.tracing = tracing
        self.known: Sequence[ClientData] = ()  # for which the next two are
        self.traced: Traced | None = None
        self.room = 0
        self.workers = torch.get_num_threads() if device.type == "cpu" else 0
        self.pool = ThreadPoolExecutor(max(1, self.workers), "client", _settle)
        if sys.platform == "linux" and self.workers:
            _keep_memory()
        import_module("torch._dynamo")  # torch.func would, in several threads at once

    def train(
        self,
        params: Params,
        clients: Sequence[ClientData],
        cohort: Cohort,
        orders: Stream,
        told: Params,
    ) -> CohortUpdate:
        def prepared() -> Iterator[Batch]:
            for lane, number in cohort.items():
                batches = local_batches(clients[number], self.config, orders, lane)
                yield on_device(batches, self.device, self.dtype)

        def update(batches: Batch) -> tuple[Update, int, int]:
            made = (step, room) if len(batches.x) <= room else (None, 0)
            done = client_update(self.method, self.config, params, batches, told, *made)
            return done, int(batches.present.sum()), batches.present.numel()

        work = prepared()
        first = next(work)
        step, room = self._step(clients, params, first, told)
        total = {n: torch.zeros_like(p) for n, p in params.items()}
        factors: dict[str, list[Factors]] = {}
        losses, points, rows = [], 0, 0
        for done, own_points, own_rows in self._map(update, chain([first], work)):
            for name, change in done.delta.items():
                total[name] += change
            for name, own in done.factors.items():
                factors.setdefault(name, []).append(own)
            losses.append(done.loss)
            points, rows = points + own_points, rows + own_rows
        for name, parts in factors.items():
            total[name] = Factors(*map(torch.cat, zip(*parts, strict=True))).product()
        delta = {n: t / len(cohort) for n, t in total.items()}
        return CohortUpdate(delta, torch.stack(losses).mean(), 1 - points / rows)

    def _step(
        self, clients: Sequence[ClientData], params: Params, batches: Batch, told: Params
    ) -> tuple[LocalStep | None, int]:
        """`local_step`, traced, with room for the longest client; None: as it is written."""
        if clients is not self.known:
            self.known, self.traced = clients, None
            self.room = self.config.epochs * -(-longest(clients) // self.config.batch_size)
        if self.traced is None and self.room and self.tracing:
            local = begin(self.method, self.config, params, self.room)
            example = (params | told, local, Batch(*(t[0] for t in batches)))
            place = torch.eye(self.room)[0].to(batches.present)
            self.traced = Traced(partial(local_step, self.method, self.config), *example, place)
        return self.traced, self.room if self.traced else 0

    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
        @torch.no_grad()
        def own(pair: SupportQuery) -> Tensor:
            support, query = pair.support.to(self.device), pair.query.to(self.device)
            present = torch.ones(support.shape[0], device=self.device, dtype=self.dtype)
            weights = self.method.personalize(params, support, present)
            return self.method.f(weights, query).cpu()

        return list(self._map(own, pairs))

    def _map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Results in order; few more than there are workers are in memory at a time."""
        if not self.workers:
            yield from map(work, items)
            return
        pending: deque[Future[Result]] = deque()
        for item in items:
            pending.append(self.pool.submit(work, item))
            if len(pending) > 2 * self.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _settle() -> None:
    """A worker has one core, and takes numbers below 1e-38 for 0: some processors need a hundred
    times as long for them, and gradients of a sure prediction are full of them.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def _keep_memory() -> None:
    """Let the C library, where it is glibc, reuse what a client frees for the next one: otherwise
    large tensors go back to the system each time, and come again page by page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        for parameter, most in ((_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**31 - 1)):
            mallopt(parameter, most)
