"""What a run suffers from, by what its folder holds and by its clients, and what to try."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from flowdup.config import Config
from flowdup.data import MEMORY, ClientData, Population, load_population
from flowdup.evaluation import transductive_logits
from flowdup.personalize import load
from flowdup.random import Stream
from flowdup.report import is_number
from flowdup.run.folder import Metrics, RunFolder
from flowdup.run.origin import check_clients, listing_of, stored_config
from flowdup.run.simulation import Simulation

_DROP = 1.0  # percentage points of validation accuracy
_LOSS_FALLS = 0.9  # to this share of what it was
_STUCK = 0.01  # the spread of r(X), as a share of its length
_MORE = 0.25  # of all predictions, that a class has more of than of the labels
_MOST_CLIENTS = 200  # that are looked at
_WINDOW = 10  # rounds over which the loss is averaged


@dataclass(frozen=True)
class Finding:
    name: str
    numbers: dict[str, float]  # that show it
    text: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    findings: list[Finding]
    unknown: list[str]  # what could not be looked at, and why


def diagnose_run(out: str | Path) -> Diagnosis:
    """Look for known ailments; nothing is written, and a run that still trains may be looked at."""
    folder = RunFolder(Path(out))
    config, rows = stored_config(folder), folder.read_metrics()
    findings = [*_of_losses(rows, config), *_of_stages(rows, config), *_of_overfitting(rows)]
    unknown = ["whether gradients are clipped throughout: a run does not store their norms"]
    if config.data.source == MEMORY:
        unknown.append("embeddings and predictions: the clients were given in Python")
        if rows and not _accuracies(rows):
            findings.append(_no_validation("no round was evaluated", 0))
        return Diagnosis(findings, unknown)
    population = load_population(config.data, Stream(config.seed).child("data"))
    check_clients(folder, listing_of(population))
    labeled = [c for c in population.validation if c.labeled]
    if not labeled:
        are = f"{len(population.validation)} validation clients, and none has a label"
        findings.append(_no_validation(are, len(population.validation)))
    findings += _of_embeddings(folder, population)
    findings += _of_predictions(folder, config, population, labeled[:_MOST_CLIENTS])
    if not load(folder.path).method.has_embedding:
        unknown.append(f"the embedding: method '{config.method.name}' has none")
    return Diagnosis(findings, unknown)


def _of_losses(rows: Sequence[Metrics], config: Config) -> Iterator[Finding]:
    wrong = [row["round"] for row in rows if not _is_finite(row.get("loss"))]
    if wrong:
        yield Finding(
            "loss-not-finite",
            {"rounds": len(wrong), "first_round": wrong[0]},
            f"the loss of {len(wrong)} rounds is not finite, first in round {wrong[0]}",
            "lower client.optimizer.lr and server.optimizer.lr, and set client.clip = 1.0",
        )
    last = rows[-1]["round"] if rows else 0
    if last < config.rounds and not config.run.patience:
        yield Finding(
            "unfinished",
            {"round": last, "rounds": config.rounds},
            f"the run has come to round {last} of {config.rounds}",
            "go on with --resume; if training diverged, lower client.optimizer.lr or "
            "server.optimizer.lr in a new folder",
        )


def _of_stages(rows: Sequence[Metrics], config: Config) -> Iterator[Finding]:
    """A first stage that is as good as the last says that the last is not needed."""
    best = [
        max((a for _, a in _accuracies(_stage_rows(rows, number))), default=math.nan)
        for number in range(len(config.stages))
    ]
    for number, stage in enumerate(config.before):
        if best[number] >= best[-1]:
            yield Finding(
                "first-stage-as-good",
                {"before": best[number], "last": best[-1]},
                f"'{stage.method.name}', a stage before, reached {best[number]:.1f}% on validation "
                f"clients, and '{config.method.name}' after it {best[-1]:.1f}%",
                f"train '{stage.method.name}' alone, which is simpler; or give the last stage more "
                "rounds, clients that differ more, or a larger method.subspace.k",
            )


def _of_overfitting(rows: Sequence[Metrics]) -> Iterator[Finding]:
    """In the last stage: the training loss falls on while validation accuracy goes down."""
    stage = _stage_rows(rows, max((row.get("stage", 0) for row in rows), default=0))
    found = _accuracies(stage)
    if len(found) < 2:
        return
    (best, top), (last, end) = max(found, key=lambda pair: (pair[1], -pair[0])), found[-1]
    then, now = (_loss_until(stage, number) for number in (best, last))
    if top - end >= _DROP and now <= _LOSS_FALLS * then:
        yield Finding(
            "over-fitting",
            {"best_round": best, "best": top, "last": end, "loss_then": then, "loss_now": now},
            f"since round {best} accuracy on validation clients fell from {top:.1f}% to {end:.1f}% "
            f"while the training loss fell from {then:.3g} to {now:.3g}",
            "keep run.keep = 'best' and set run.patience; then try a smaller method.subspace.k, "
            "client.shift or client.mirror for images, more clients, or fewer rounds",
        )


def _of_embeddings(folder: RunFolder, population: Population) -> Iterator[Finding]:
    federation = load(folder.path)
    every = [population.validation, population.test, population.train]
    clients = next((group for group in every if len(group) > 1), [])[:_MOST_CLIENTS]
    if not federation.method.has_embedding or not clients:
        return
    r = torch.stack([federation.embedding(c.x) for c in clients]).double()  # [clients, embedding]
    center = r.mean(0)
    spread = float((r - center).square().sum(1).mean().sqrt())
    share = spread / max(float(center.norm()), 1e-12)
    if share < _STUCK:
        yield Finding(
            "stuck-embedding",
            {"spread": share, "clients": len(clients)},
            f"the embeddings r(X) of {len(clients)} clients are alike: they spread by "
            f"{100 * share:.2g}% of their length, so that all clients get about the same model",
            "try a lower client.optimizer.lr, method.hypernetwork.pooling = 'mean-std', a smaller "
            "method.regularization, or look whether inputs differ between clients at all",
        )


def _of_predictions(
    folder: RunFolder, config: Config, population: Population, clients: Sequence[ClientData]
) -> Iterator[Finding]:
    """Of labeled validation clients, by their own models."""
    if not clients:
        return
    simulation, state = Simulation.resume(config, folder.kept, population)
    classes = population.spec.classes
    predicted, truly = torch.zeros(classes), torch.zeros(classes)
    accuracies = []
    for client, logits in zip(
        clients, transductive_logits(simulation.engine, state.deployed, clients), strict=True
    ):
        there = client.labels >= 0
        answers, y = logits.argmax(1).cpu()[there], client.labels[there]
        predicted += torch.bincount(answers, minlength=classes)
        truly += torch.bincount(y, minlength=classes)
        accuracies.append(100 * float((answers == y).double().mean()))
    predicted, truly = predicted / predicted.sum(), truly / truly.sum()
    most = int(predicted.argmax())
    name = population.spec.class_names[most] if population.spec.class_names else str(most)
    if predicted[most] - truly[most] >= _MORE:
        yield Finding(
            "one-class-dominates",
            {"class": most, "predicted": float(predicted[most]), "labels": float(truly[most])},
            f"{100 * predicted[most]:.0f}% of all predictions for validation clients are class "
            f"'{name}', which {100 * truly[most]:.0f}% of their labels are",
            "train longer or with a higher client.optimizer.lr; where classes are unbalanced, try "
            "method.name = 'fedavg-la' or method.correction = 'em'",
        )
    accuracy, guessing = fmean(accuracies), 100 * float(truly.max())
    if accuracy <= guessing:
        yield Finding(
            "no-better-than-guessing",
            {"accuracy": accuracy, "guessing": guessing},
            f"accuracy on validation clients is {accuracy:.1f}%, and {guessing:.1f}% of their "
            "labels are of one class",
            "begin with settings that fit the data (flowdup init), more rounds, or another "
            "client.optimizer.lr; inputs must be normalised (data.normalize)",
        )


def _no_validation(are: str, clients: int) -> Finding:
    return Finding(
        "no-validation",
        {"clients": clients, "labeled": 0},
        f"there are {are}: no round can be called the best, and models are not calibrated",
        "set data.validation_clients, and give some of these clients labels",
    )


def _stage_rows(rows: Sequence[Metrics], stage: int) -> list[Metrics]:
    return [row for row in rows if row.get("stage", 0) == stage]


def _accuracies(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Of validation clients, by round."""
    key = "validation_accuracy"
    return [(row["round"], row[key]) for row in rows if _is_finite(row.get(key))]


def _loss_until(rows: Sequence[Metrics], last: int) -> float:
    """The mean over some rounds before and with this one."""
    there = [r["loss"] for r in rows if last - _WINDOW < r["round"] <= last]
    return fmean(loss if _is_finite(loss) else math.inf for loss in there)


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)
