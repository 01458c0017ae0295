"""The whole cohort as one tensor program: `vmap` of ClientUpdate's steps over slots of clients.

On a GPU the clients' points stay there, a step is compiled and replayed (`accelerate/`), and the
host never waits for it.  The result is the reference engine's up to rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.func import vmap

from flowdup.accelerate.compiling import CompiledStep, EagerStep
from flowdup.accelerate.layers import for_clients
from flowdup.accelerate.packed import PackedVectors
from flowdup.augmentation import Augmentation
from flowdup.batches import Plan, PointPool, batch_plans, input_bytes, most_points
from flowdup.client import ClientConfig, ClientUpdate
from flowdup.data.clients import ClientData
from flowdup.devices import gpu_is_full
from flowdup.engines.base import Roster, SupportQuery
from flowdup.engines.slots import Slots, advance, schedule, slots_needed
from flowdup.messages import Reply, Task
from flowdup.methods import Batch, Method, Params
from flowdup.models.network import replaced_layers
from flowdup.random import Stream

_POINTS = 10_000  # that go through personalised models at once
_SHARE = 0.25  # of a GPU's free memory, which clients' points may take for good

Fixed = tuple[Params, Params]  # psi, and what is broadcast besides
Inputs = tuple[Tensor | Batch, Tensor]


class BatchedEngine:
    """Runs a whole cohort as one tensor program; clients of any size take turns in its slots."""

    def __init__(
        self,
        method: Method,
        config: ClientConfig,
        clients: Sequence[ClientData],
        stream: Stream,
        device: torch.device,
        dtype: torch.dtype,
        clients_at_once: int = 0,  # 0: as many as fit
        compiled: bool = False,
    ) -> None:
        self.method, self.config, self.device, self.dtype = method, config, device, dtype
        self.clients, self.stream, self.roster = clients, stream, Roster.of(clients)
        self.clients_at_once, self.compiled = clients_at_once, compiled
        self.update: ClientUpdate | None = None
        self.compiled_step: CompiledStep[Slots] | None = None
        self.packed: PackedVectors  # of psi, once a round brings it

    def train(self, task: Task) -> Iterator[Reply]:
        """One reply, the sum of all."""
        members = {number: self.clients[number] for number in task.cohort.values()}
        pool = self.resident or PointPool.of(members, self.device, self.config.augmentation)
        if self.method.relabels:
            self._relabel(pool, members, task)
        points = {position: len(members[number]) for position, number in task.cohort.items()}
        orders = self.stream.child("order", task.round)
        size = self.config.epochs, self.config.batch_size
        plans = batch_plans(orders, points, *size, self.config.augmentation)
        first = [pool.first[number] for number in task.cohort.values()]
        slots, rows = self._run(task, [*plans.values()], first, pool)
        delta = self.packed.unpack(slots.delta)
        done = self.config.epochs * sum(points.values())
        yield Reply(task.round, delta, slots.loss, done, rows, clients=len(task.cohort))

    @cached_property
    def resident(self) -> PointPool | None:
        """All clients' points, on a GPU, for good; None: there are too many, or clients are made
        when asked for.
        """
        if self.device.type != "cuda" or not isinstance(self.clients, list):
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        fits = input_bytes(self.clients) <= _SHARE * free
        if not fits:
            return None
        return PointPool.of(dict(enumerate(self.clients)), self.device, self.config.augmentation)

    @torch.no_grad()
    @replaced_layers(for_clients)
    def _relabel(self, pool: PointPool, members: Mapping[int, ClientData], task: Task) -> None:
        """Put the labels that members train on into the pool, where a compiled step reads them."""

        def own(x: Tensor, y: Tensor, present: Tensor) -> Tensor:
            return self.method.labels(task.start, x, y, present)

        taught = [n for n, client in members.items() if bool((client.labels < 0).any())]
        plain = pool._replace(augmentation=Augmentation())
        for group in _by_size([len(members[n]) for n in taught], self.clients_at_once):
            numbers = [taught[i] for i in group]
            parts = [pool.first[n] + torch.arange(len(members[n])) for n in numbers]
            places = torch.cat(
                [i * len(parts[0]) + torch.arange(len(p)) for i, p in enumerate(parts)]
            )
            rows, y = (_pad(p, -1) for p in (parts, [members[n].labels for n in numbers]))
            batch = plain.batch(self._send(rows), self.dtype)
            found = vmap(own)(batch.x, self._send(y), batch.present).flatten()
            pool.y.index_copy_(0, self._send(torch.cat(parts)), found[self._send(places)])

    def _run(
        self, task: Task, plans: list[Plan], first: list[int], pool: PointPool
    ) -> tuple[Slots, int]:
        """All clients' steps, in half as many slots where they do not fit in memory."""
        count = slots_needed(list(map(len, plans)), self.clients_at_once)
        while True:
            try:
                return self._run_in(count, task, plans, first, pool)
            except torch.OutOfMemoryError as error:
                self.compiled_step = None
                torch.cuda.empty_cache()
                if count == 1:
                    raise gpu_is_full("one client alone") from error
                self.clients_at_once = count = -(-count // 2)

    def _run_in(
        self, count: int, task: Task, plans: list[Plan], first: list[int], pool: PointPool
    ) -> tuple[Slots, int]:
        steps = max(map(len, plans))
        if self.compiled_step and self.compiled_step.state.can_hold(steps):
            count = self.compiled_step.state.width
        dealt = schedule(plans, first, count)
        points, progress = (self._send(torch.from_numpy(part)).unbind() for part in dealt)
        if self.update is None:
            self._prepare(task, pool.batch(points[0][0], self.dtype))
        fixed = self.packed.pack(task.psi), task.broadcast
        program: EagerStep[Slots] | CompiledStep[Slots] | None = None
        for rows, now in zip(points, progress, strict=True):
            inputs = rows if pool is self.resident else pool.batch(rows, self.dtype), now
            program = program or self._program(fixed, count, steps, inputs)
            program(*inputs)
        assert program is not None
        return program.state, dealt.points.size

    def _send(self, numbers: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return numbers
        return numbers.pin_memory().to(self.device, non_blocking=True)

    def _prepare(self, task: Task, batch: Batch) -> None:
        """Once, on the first batch: what every client runs."""
        self.packed = PackedVectors(self.method, task.psi)
        update = ClientUpdate.for_task(self.method, self.config, task, batch)
        self.update = replace(update, method=self.packed)

    def _program(
        self, fixed: Fixed, count: int, steps: int, inputs: Inputs
    ) -> EagerStep[Slots] | CompiledStep[Slots]:
        """One that is ready for a round."""
        assert self.update is not None
        if not self.compiled:
            return EagerStep(self._step, fixed, Slots.idle(self.update, fixed[0], count, steps))
        if self.compiled_step is None or not self.compiled_step.state.can_hold(steps):
            self.compiled_step = None
            most = max(steps, self.config.steps(most_points(self.clients)))
            idle = Slots.idle(self.update, fixed[0], count, most)
            self.compiled_step = CompiledStep(self._step, fixed, idle, *inputs)
        self.compiled_step.begin(fixed)
        self.compiled_step.state.clear()
        return self.compiled_step

    @replaced_layers(for_clients)
    def _step(self, fixed: Fixed, slots: Slots, points: Tensor | Batch, progress: Tensor) -> Slots:
        """`points` are rows of the resident pool, or a batch of another."""
        if isinstance(points, Tensor):
            assert self.resident is not None
            points = self.resident.batch(points, self.dtype)
        assert self.update is not None
        return advance(self.update, *fixed, slots, points, progress)

    @torch.no_grad()
    @replaced_layers(for_clients)
    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
        """Of every pair, the client's own model on its query; many clients at once."""

        def own(support: Tensor, present: Tensor, query: Tensor) -> Tensor:
            return self.method.logits(params, support, present, query)

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


def _pad(parts: Sequence[Tensor], value: int = 0) -> Tensor:
    """Stack tensors that differ in their first dimension; the value fills the rest."""
    longest = max(part.shape[0] for part in parts)
    out = parts[0].new_full((len(parts), longest, *parts[0].shape[1:]), value)
    for row, part in zip(out, parts, strict=True):
        row[: part.shape[0]] = part
    return out
