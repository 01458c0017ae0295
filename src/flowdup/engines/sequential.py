"""The reference engine: one client after the other, only its last batch padded.

On a CPU as many clients run at a time as torch has threads, each on one of them: small convolutions
on one core each are faster than one on all cores, and the bits do not depend on how many there are.
"""

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from flowdup.accelerate.torch_private import import_dynamo
from flowdup.accelerate.tracing import TracedFunction
from flowdup.batches import batch_plan, local_batches, most_points
from flowdup.client import ClientConfig, ClientUpdate
from flowdup.data.clients import ClientData
from flowdup.engines.base import Roster, SupportQuery
from flowdup.messages import Reply, Task
from flowdup.methods import Batch, Method, Params
from flowdup.random import Stream

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # in malloc.h

Item = TypeVar("Item")
Result = TypeVar("Result")


class SequentialEngine:
    """Runs one client after the other: the reference, and faster for large models on a CPU."""

    def __init__(
        self,
        method: Method,
        config: ClientConfig,
        clients: Sequence[ClientData],
        stream: Stream,
        device: torch.device,
        dtype: torch.dtype,
        tracing: bool = True,
    ) -> None:
        self.method, self.config, self.device, self.dtype = method, config, device, dtype
        self.clients, self.stream, self.roster = clients, stream, Roster.of(clients)
        self.most_steps = config.steps(most_points(clients)) if tracing else 0  # 0: as written
        self.update: ClientUpdate | None = None
        self.traced: TracedFunction | None = None
        self.workers = torch.get_num_threads() if device.type == "cpu" else 0
        self.pool = ThreadPoolExecutor(max(1, self.workers), "client", _use_one_core)
        if sys.platform == "linux" and self.workers:
            _keep_memory()
        import_dynamo()  # torch.func would, in several threads at once

    def train(self, task: Task) -> Iterator[Reply]:
        """One reply for every member of the cohort."""
        orders = self.stream.child("order", task.round)
        augmentation = self.config.augmentation

        def batches(position: int) -> Batch:
            client = self._relabeled(self.clients[task.cohort[position]], task)
            size = self.config.epochs, self.config.batch_size
            plan = batch_plan(orders, position, len(client), *size, augmentation)
            return local_batches(client, plan, self.device, self.dtype, augmentation)

        made: dict[int, Batch] = {}
        if self.update is None:
            first = next(iter(task.cohort))
            made[first] = batches(first)
            self._prepare(task, Batch(*(t[0] for t in made[first])))
        update, traced = self.update, self.traced
        assert update is not None

        def reply(position: int) -> Reply:
            own = made.pop(position) if position in made else batches(position)
            fast = traced and len(own.x) <= self.most_steps
            found = update(task, own, traced, self.most_steps) if fast else update(task, own)
            return replace(found, member=position)

        yield from self._map(reply, task.cohort)

    @torch.no_grad()
    def _relabeled(self, client: ClientData, task: Task) -> ClientData:
        """With the labels that it trains on."""
        y = client.labels
        if not self.method.relabels or bool((y >= 0).all()):
            return client
        present = torch.ones(len(client), device=self.device, dtype=self.dtype)
        x, y = client.x.to(self.device), y.to(self.device)
        return replace(client, y=self.method.labels(task.start, x, y, present))

    def _prepare(self, task: Task, batch: Batch) -> None:
        """Once: what clients run, and its step traced, with room for the longest of them."""
        self.update = ClientUpdate.for_task(self.method, self.config, task, batch)
        if self.most_steps:
            local = self.update.begin(task.psi, self.most_steps)
            place = torch.eye(self.most_steps)[0].to(batch.present)
            self.traced = TracedFunction(self.update.step, task.start, local, batch, place)

    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
        """Of every pair, the client's own model on its query."""

        @torch.no_grad()
        def own(pair: SupportQuery) -> Tensor:
            support, query = pair.support.to(self.device), pair.query.to(self.device)
            present = torch.ones(support.shape[0], device=self.device, dtype=self.dtype)
            return self.method.logits(params, support, present, query).cpu()

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


def _use_one_core() -> None:
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
