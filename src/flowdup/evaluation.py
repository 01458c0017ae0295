"""Evaluation: logits of clients' own models -> a table of metrics, over points and over clients.

Two readings of "unlabeled test clients", which papers do not always tell apart:

transductive: personalize on all of a client's points and score these points.
held_out:     personalize on one random half of them and score the other half.

`evaluate_by_support` is held_out with models made from fewer points of the first half, and
`evaluate_fixed` scores one given model at every client.

Labels are only compared with logits here.  Beside it, those of validation clients fit a correction
(`calibration.py`).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flowdup.data.clients import ClientData
from flowdup.data.traits import Trait
from flowdup.engines import Engine, SupportQuery
from flowdup.errors import ConfigError, DataError
from flowdup.methods import Params
from flowdup.metrics import METRICS, Metric
from flowdup.random import Stream

READINGS = ("transductive", "held_out")
FIXED = "fixed_model"  # the reading of a model that is the same for every client
PERCENTILES = (10, 25, 50, 75, 90)
MOST_CLASSES = 200  # of a confusion matrix

Values = dict[str, float]  # by metric, of one client; without those that it has no value of
Pairs = Counter[tuple[int, int]]  # points by label and prediction


@dataclass(frozen=True)
class ClientScore:
    """One client's metrics by reading; none where it has no labeled point to compare with."""

    name: str
    traits: dict[str, Trait]
    points: int
    metrics: dict[str, Values]
    pairs: dict[str, Pairs]  # by reading, what confusion matrices are made of


@dataclass(frozen=True)
class Summary:
    """One metric over clients, each client counted once; None where no client has it."""

    mean: float | None = None
    std: float | None = None  # over clients: how unequal they fare
    worst_decile: float | None = None  # the mean over the worst tenth of them, rounded up
    worst: float | None = None  # of the worst client


def summarize(values: Sequence[float], higher_is_better: bool = True) -> Summary:
    """Mean, deviation, worst tenth and worst of the values of clients; empty if there are none."""
    if not values:
        return Summary()
    worst_first = np.sort(values) if higher_is_better else np.sort(values)[::-1]
    tenth = worst_first[: -(-len(values) // 10)]
    with np.errstate(invalid="ignore"):  # infinite values have no deviation: NaN
        std = float(np.std(values))
    return Summary(float(np.mean(values)), std, float(tenth.mean()), float(tenth[0]))


def evaluate(
    engine: Engine, params: Params, clients: Sequence[ClientData], stream: Stream
) -> list[ClientScore]:
    """Every metric of every client, in both readings; the stream halves the clients' points."""
    _check_labels(clients)
    answers = {
        "transductive": _transductive(engine, params, clients),
        "held_out": _held_out(engine, params, clients, _halves(clients, stream)),
    }
    return _scores(clients, answers)


def evaluate_fixed(
    logits: Callable[[Tensor], Tensor], clients: Sequence[ClientData]
) -> list[ClientScore]:
    """Every metric of every client by one model, a function from inputs to logits on the CPU."""
    _check_labels(clients)
    return _scores(clients, {FIXED: [_Answers.of(logits(c.x), c.y) for c in clients]})


def _check_labels(clients: Sequence[ClientData]) -> None:
    if not any(client.labeled for client in clients):
        raise DataError("no client to evaluate has labels to compare with: label some test clients")


def metrics_table(scores: Sequence[ClientScore]) -> dict[str, dict[str, Summary]]:
    """`Summary` by reading and by metric."""
    return {r: _summaries([score.metrics[r] for score in scores]) for r in _readings(scores)}


def percentiles_table(scores: Sequence[ClientScore]) -> dict[str, dict[str, Values]]:
    """Percentiles over clients, p10 to p90, by reading and by metric; empty where none has it.

    p10 is the value that a tenth of the clients have less than, whether more is better or not;
    between two clients it is interpolated.
    """
    return {
        r: {
            name: _percentiles([s.metrics[r][name] for s in scores if name in s.metrics[r]])
            for name in METRICS
        }
        for r in _readings(scores)
    }


def _percentiles(values: Sequence[float]) -> Values:
    with np.errstate(invalid="ignore"):  # between infinite values: NaN
        found = np.percentile(values, PERCENTILES).tolist() if values else []
    return {f"p{share}": value for share, value in zip(PERCENTILES, found, strict=False)}


def confusion_matrices(
    scores: Sequence[ClientScore], classes: int
) -> dict[str, list[list[int]]] | None:
    """By reading: in row i and column j, how many points of class i are taken for class j, at all
    clients together.  None of more than `MOST_CLASSES` classes.
    """
    if classes > MOST_CLASSES:
        return None
    found = {r: sum((score.pairs[r] for score in scores), Pairs()) for r in _readings(scores)}
    places = range(classes)
    return {r: [[total[i, j] for j in places] for i in places] for r, total in found.items()}


def _readings(scores: Sequence[ClientScore]) -> list[str]:
    return list(scores[0].metrics) if scores else []


def _summaries(found: Sequence[Values]) -> dict[str, Summary]:
    return {
        name: summarize([own[name] for own in found if name in own], metric.higher_is_better)
        for name, metric in METRICS.items()
    }


@dataclass(frozen=True)
class SupportScore:
    """Metrics over clients whose models are made from so many points each."""

    points: int
    clients: int
    metrics: dict[str, Summary]


def evaluate_by_support(
    engine: Engine,
    params: Params,
    clients: Sequence[ClientData],
    stream: Stream,
    sizes: Sequence[int],
) -> list[SupportScore]:
    """Metrics against |X|: the first n points of a client's generating half make its model, for
    every n of `sizes`, and the other half, always the same, is scored.

    With the stream of `evaluate` the halves are the same as there.  Only clients with labels and
    with enough points for the largest n take part, so that nothing but n differs.
    """
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigError(
            f"a model is made from at least 1 point: {list(sizes)} has another number"
        )
    halves, largest = _halves(clients, stream), max(sizes, default=0)
    enough = {i: h for i, h in halves.items() if clients[i].labeled and len(h[0]) >= largest}
    if not enough:
        most = max((len(half) for half, _ in halves.values()), default=0)
        raise ConfigError(
            f"no labeled test client has {largest} points to make a model from and as many to "
            f"score it on: ask for {most} at most, or train with larger data.points"
        )
    rows = []
    for size in sizes:
        fewer = {i: (support[:size], query) for i, (support, query) in enough.items()}
        found = _held_out(engine, params, clients, fewer)
        values = [answers.values(METRICS) if answers else {} for answers in found]
        rows.append(SupportScore(size, len(enough), _summaries(values)))
    return rows


def transductive_accuracy(engine: Engine, params: Params, clients: Sequence[ClientData]) -> Summary:
    """Accuracy alone, in percent."""
    return accuracy_summary(transductive_logits(engine, params, clients), clients)


def accuracy_summary(logits: Sequence[Tensor], clients: Sequence[ClientData]) -> Summary:
    """Accuracy over clients, in percent, by the logits of their points."""
    table = {"accuracy": METRICS["accuracy"]}
    answers = (_Answers.of(own, c.y) for own, c in zip(logits, clients, strict=True))
    return summarize([own.values(table)["accuracy"] for own in answers if own])


def pooled_loss(logits: Sequence[Tensor], clients: Sequence[ClientData]) -> float:
    """Mean negative log-likelihood of a labeled point, whoever's; infinite if it is no number."""
    answers = [_Answers.of(own, c.y) for own, c in zip(logits, clients, strict=True)]
    losses = [cross_entropy(*own, reduction="none") for own in answers if own]
    mean = float(torch.cat(losses).mean()) if losses else math.nan
    return mean if math.isfinite(mean) else math.inf


def transductive_logits(
    engine: Engine, params: Params, clients: Sequence[ClientData]
) -> list[Tensor]:
    """Of every client's own points, by the model that these points make.

    They make it in a mixed order: clients may store them class by class, and a method that takes
    them in batches should meet batches like those of training.
    """
    return engine.logits(params, [SupportQuery(c.x[_mixed(len(c))], c.x) for c in clients])


def _mixed(points: int) -> Tensor:
    return torch.from_numpy(Stream(0).child("support").permutation(points))


class _Answers(NamedTuple):
    """What a model says of a client's labeled points."""

    logits: Tensor  # [n, C] float64
    y: Tensor  # [n]

    @classmethod
    def of(cls, logits: Tensor, y: Tensor | None) -> "_Answers | None":
        """None where no point has a label."""
        if y is None or not bool((known := y >= 0).any()):
            return None
        return cls(logits[known].double(), y[known])

    def values(self, metrics: Mapping[str, Metric]) -> Values:
        found = {name: float(metric.function(*self)) for name, metric in metrics.items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def pairs(self) -> Pairs:
        return Counter(zip(self.y.tolist(), self.logits.argmax(1).tolist(), strict=True))


def _scores(
    clients: Sequence[ClientData], answers: Mapping[str, Sequence[_Answers | None]]
) -> list[ClientScore]:
    scores = []
    for i, c in enumerate(clients):
        own = {reading: found[i] for reading, found in answers.items()}
        values = {r: a.values(METRICS) if a else {} for r, a in own.items()}
        pairs = {r: a.pairs() if a else Pairs() for r, a in own.items()}
        scores.append(ClientScore(c.name, c.traits, len(c), values, pairs))
    return scores


def _transductive(
    engine: Engine, params: Params, clients: Sequence[ClientData]
) -> list[_Answers | None]:
    logits = transductive_logits(engine, params, clients)
    return [_Answers.of(own, c.y) for own, c in zip(logits, clients, strict=True)]


Halves = dict[int, tuple[Tensor, Tensor]]  # by client: the points to generate from, and to score


def _halves(clients: Sequence[ClientData], stream: Stream) -> Halves:
    """Client i's order is substream i; a client of one point has no other half."""
    halves = {}
    for i, client in enumerate(clients):
        order = torch.from_numpy(np.argsort(stream.substreams(i, 1, len(client))[0], kind="stable"))
        if len(client) > 1:
            support, query = order.tensor_split(2)
            halves[i] = support, query
    return halves


def _held_out(
    engine: Engine, params: Params, clients: Sequence[ClientData], halves: Halves
) -> list[_Answers | None]:
    found: list[_Answers | None] = [None for _ in clients]
    pairs = [SupportQuery(clients[i].x[a], clients[i].x[b]) for i, (a, b) in halves.items()]
    for (i, (_, query)), own in zip(halves.items(), engine.logits(params, pairs), strict=True):
        y = clients[i].y
        found[i] = _Answers.of(own, None if y is None else y[query])
    return found
