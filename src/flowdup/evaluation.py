"""How well clients' own models do, in both readings of "accuracy on unlabeled test clients".

transductive: generate the model on all of a client's points and predict these points.
held-out:     generate it on one random half of them and predict the other half.

Labels are compared with predictions here and go nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowdup.data.clients import ClientData, Trait
from flowdup.engines import Engine, SupportQuery
from flowdup.errors import DataError
from flowdup.methods import Params
from flowdup.random import Stream


@dataclass(frozen=True)
class ClientScore:
    """One client's accuracies in percent; None where it has no labeled point to compare with."""

    name: str
    traits: dict[str, Trait]
    points: int
    transductive: float | None
    held_out: float | None


def transductive_accuracy(
    engine: Engine, params: Params, clients: Sequence[ClientData]
) -> float | None:
    """Mean over clients, in percent; None where nothing can be compared."""
    return _mean(_transductive(engine, params, clients))


def evaluate(
    engine: Engine, params: Params, clients: Sequence[ClientData], stream: Stream
) -> list[ClientScore]:
    if not any(client.labeled for client in clients):
        raise DataError("no client to evaluate has labels to compare with: label some test clients")
    transductive = _transductive(engine, params, clients)
    held_out = _held_out(engine, params, clients, stream)
    return [
        ClientScore(c.name, c.traits, len(c), t, h)
        for c, t, h in zip(clients, transductive, held_out, strict=True)
    ]


def mean_accuracy(scores: Sequence[ClientScore]) -> dict[str, float | None]:
    """Both readings, mean over clients, in percent."""
    return {
        "transductive": _mean([s.transductive for s in scores]),
        "held_out": _mean([s.held_out for s in scores]),
    }


def _transductive(
    engine: Engine, params: Params, clients: Sequence[ClientData]
) -> list[float | None]:
    answers = engine.logits(params, [SupportQuery(c.x, c.x) for c in clients])
    return [_accuracy(a, c.y) for a, c in zip(answers, clients, strict=True)]


def _held_out(
    engine: Engine, params: Params, clients: Sequence[ClientData], stream: Stream
) -> list[float | None]:
    scores: list[float | None] = [None] * len(clients)
    halves = {}
    for i, client in enumerate(clients):
        order = torch.from_numpy(np.argsort(stream.lanes(i, 1, len(client))[0], kind="stable"))
        if len(client) > 1:
            halves[i] = order.tensor_split(2)
    pairs = [SupportQuery(clients[i].x[a], clients[i].x[b]) for i, (a, b) in halves.items()]
    answers = engine.logits(params, pairs)
    for (i, (_, query)), answer in zip(halves.items(), answers, strict=True):
        y = clients[i].y
        scores[i] = _accuracy(answer, None if y is None else y[query])
    return scores


def _accuracy(answer: Tensor, y: Tensor | None) -> float | None:
    if y is None or not bool((y >= 0).any()):
        return None
    known = y >= 0
    return 100.0 * float((answer[known].argmax(1) == y[known]).double().mean())


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return float(np.mean(known)) if known else None
