"""The whole cohort as one tensor program: `vmap` of ClientUpdate over its members.

Clients of different sizes are padded to the largest of the cohort; padding rows carry no weight
and padding steps change nothing, so the result is the reference engine's up to rounding.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from flowdup.client import ClientConfig, Update, client_update
from flowdup.data.clients import ClientData
from flowdup.engines.base import Question, local_batches, on_device
from flowdup.methods import Batch, Method, Params
from flowdup.random import Stream

_POINTS = 10_000  # that go through personalised models at once


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

    def train(self, params: Params, cohort: Sequence[ClientData], orders: Stream) -> Update:
        def member(batches: Batch) -> Update:
            return client_update(self.method, self.config, params, batches)

        total: Params = {n: torch.zeros_like(p) for n, p in params.items()}
        loss = torch.zeros((), device=self.device, dtype=self.dtype)
        for lanes in self._split(len(cohort)):
            batches = [local_batches(cohort[i], self.config, orders, i) for i in lanes]
            update = vmap(member)(on_device(_stack(batches), self.device, self.dtype))
            total = {n: t + update.delta[n].sum(0) for n, t in total.items()}
            loss = loss + update.loss.sum()
        return Update({n: t / len(cohort) for n, t in total.items()}, loss / len(cohort))

    @torch.no_grad()
    def predict(self, params: Params, questions: Sequence[Question]) -> list[Tensor]:
        def answer(x: Tensor, present: Tensor, query: Tensor) -> Tensor:
            weights = self.method.personalize(params, x, present)
            return self.method.f(weights, query).argmax(1)

        answers: dict[int, Tensor] = {}
        for lanes in self._alike(questions):
            group = [questions[i] for i in lanes]
            present = _pad([torch.ones(q.x.shape[0], dtype=self.dtype) for q in group])
            inputs = (_pad([q.x for q in group]), present, _pad([q.query for q in group]))
            found = vmap(answer)(*(t.to(self.device) for t in inputs)).cpu()
            for i, row in zip(lanes, found, strict=True):
                answers[i] = row[: questions[i].query.shape[0]]
        return [answers[i] for i in range(len(questions))]

    def _alike(self, questions: Sequence[Question]) -> Iterator[list[int]]:
        """Questions of like size together, so that little is padded and memory stays bounded."""
        sizes = [q.x.shape[0] + q.query.shape[0] for q in questions]
        limit = self.clients_at_once or len(questions)
        group: list[int] = []
        for i in sorted(range(len(questions)), key=sizes.__getitem__, reverse=True):
            if group and (len(group) == limit or sizes[group[0]] * (len(group) + 1) > _POINTS):
                yield group
                group = []
            group.append(i)
        if group:
            yield group

    def _split(self, members: int) -> Iterator[range]:
        size = self.clients_at_once or members
        for start in range(0, members, size):
            yield range(start, min(start + size, members))


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
