"""The reference engine: one client after the other, only its last batch padded."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowdup.client import ClientConfig, client_update
from flowdup.data.clients import ClientData
from flowdup.engines.base import Cohort, CohortUpdate, Question, local_batches, on_device
from flowdup.methods import Method, Params
from flowdup.random import Stream


class SequentialEngine:
    def __init__(
        self, method: Method, config: ClientConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.method, self.config, self.device, self.dtype = method, config, device, dtype

    def train(
        self,
        params: Params,
        clients: Sequence[ClientData],
        cohort: Cohort,
        orders: Stream,
        told: Params,
    ) -> CohortUpdate:
        total = {n: torch.zeros_like(p) for n, p in params.items()}
        losses, points, rows = [], 0, 0
        for lane, number in cohort.items():
            client = clients[number]
            batches = local_batches(client, self.config, orders, lane)
            batches = on_device(batches, self.device, self.dtype)
            update = client_update(self.method, self.config, params, batches, told)
            delta = update.whole()
            total = {n: t + delta[n] for n, t in total.items()}
            losses.append(update.loss)
            points, rows = points + len(client), rows + batches.present.numel()
        delta = {n: t / len(cohort) for n, t in total.items()}
        padding = 1 - self.config.epochs * points / rows
        return CohortUpdate(delta, torch.stack(losses).mean(), padding)

    @torch.no_grad()
    def predict(self, params: Params, questions: Sequence[Question]) -> list[Tensor]:
        answers = []
        for question in questions:
            x, query = question.x.to(self.device), question.query.to(self.device)
            present = torch.ones(x.shape[0], device=self.device, dtype=self.dtype)
            weights = self.method.personalize(params, x, present)
            answers.append(self.method.f(weights, query).argmax(1).cpu())
        return answers
