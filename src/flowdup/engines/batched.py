"""The whole cohort as one tensor program: `vmap` of ClientUpdate over its members.

Clients of different sizes are sorted by length and run in groups of like length, each padded to its
longest member.  Padding rows carry no weight and padding steps change nothing, so the result is the
reference engine's up to rounding.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from flowdup.client import ClientConfig, Update, client_update
from flowdup.data.clients import ClientData
from flowdup.engines.base import Cohort, CohortUpdate, Question, local_batches, on_device
from flowdup.methods import Batch, Method, Params
from flowdup.random import Stream

_POINTS = 10_000  # that go through personalised models at once
_EMPTY = 0.2  # the share of a group's steps that may be padding


class BatchedEngine:
    def __init__(
        self,
        method: Method,
        config: ClientConfig,
        device: torch.device,
        dtype: torch.dtype,
        clients_at_once: int = 0,  # 0: the whole cohort
    ) -> None:
        self.method, self.config, self.device, self.dtype = method, config, device, dtype
        self.clients_at_once = clients_at_once

    def train(
        self,
        params: Params,
        clients: Sequence[ClientData],
        cohort: Cohort,
        orders: Stream,
        told: Params,
    ) -> CohortUpdate:
        def member(batches: Batch) -> Update:
            return client_update(self.method, self.config, params, batches, told)

        total: Params = {n: torch.zeros_like(p) for n, p in params.items()}
        loss = torch.zeros((), device=self.device, dtype=self.dtype)
        members = [(lane, clients[number]) for lane, number in cohort.items()]
        steps = [-(-len(client) // self.config.batch_size) for _, client in members]
        rows = 0
        for group in _by_size(steps, self.clients_at_once, _little_padding):
            batches = _stack(
                [local_batches(members[i][1], self.config, orders, members[i][0]) for i in group]
            )
            update = vmap(member)(on_device(batches, self.device, self.dtype))
            here = {n: d.sum(0) for n, d in update.delta.items()}
            for name, (left, right) in update.factors.items():  # of all members and steps at once
                here[name] = left.flatten(0, 1).T @ right.flatten(0, 1)
            total = {n: t + here[n] for n, t in total.items()}
            loss = loss + update.loss.sum()
            rows += batches.present.numel()
        delta = {n: t / len(cohort) for n, t in total.items()}
        padding = 1 - self.config.epochs * sum(len(client) for _, client in members) / rows
        return CohortUpdate(delta, loss / len(cohort), padding)

    @torch.no_grad()
    def predict(self, params: Params, questions: Sequence[Question]) -> list[Tensor]:
        def answer(x: Tensor, present: Tensor, query: Tensor) -> Tensor:
            weights = self.method.personalize(params, x, present)
            return self.method.f(weights, query).argmax(1)

        answers: dict[int, Tensor] = {}
        sizes = [q.x.shape[0] + q.query.shape[0] for q in questions]
        for lanes in _by_size(sizes, self.clients_at_once, _little_memory):
            group = [questions[i] for i in lanes]
            present = _pad([torch.ones(q.x.shape[0], dtype=self.dtype) for q in group])
            inputs = (_pad([q.x for q in group]), present, _pad([q.query for q in group]))
            found = vmap(answer)(*(t.to(self.device) for t in inputs)).cpu()
            for i, row in zip(lanes, found, strict=True):
                answers[i] = row[: questions[i].query.shape[0]]
        return [answers[i] for i in range(len(questions))]


def _by_size(
    sizes: Sequence[int], limit: int, fits: Callable[[int, int, int], bool]
) -> Iterator[list[int]]:
    """Indices in groups of like size, the largest first, `limit` members at most (0: no limit).

    `fits` says of a group whether it may stand, by its largest size, its members and their sum.
    """
    group: list[int] = []
    total = 0
    for i in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        full = group and len(group) == limit
        if full or (group and not fits(sizes[group[0]], len(group) + 1, total + sizes[i])):
            yield group
            group, total = [], 0
        group.append(i)
        total += sizes[i]
    if group:
        yield group


def _little_padding(longest: int, members: int, steps: int) -> bool:
    return steps >= (1 - _EMPTY) * longest * members


def _little_memory(largest: int, members: int, _: int) -> bool:
    return largest * members <= _POINTS


def _stack(batches: Sequence[Batch]) -> Batch:
    """[clients, steps, B, ...], clients with fewer steps padded with empty ones."""
    return Batch(*(_pad(parts) for parts in zip(*batches, strict=True)))


def _pad(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors that differ in their first dimension; zeros fill the rest."""
    longest = max(part.shape[0] for part in parts)
    out = parts[0].new_zeros((len(parts), longest, *parts[0].shape[1:]))
    for row, part in zip(out, parts, strict=True):
        row[: part.shape[0]] = part
    return out
