"""What a run suffers from, by what its folder holds and by its clients, and what to try."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from flowdup.checkpoint import load_checkpoint
from flowdup.config import Config
from flowdup.data import MEMORY, ClientData, Population, load_population
from flowdup.evaluation import transductive_logits
from flowdup.personalize import load
from flowdup.random import Stream
from flowdup.run.findings import (
    Finding,
    accuracies,
    find_clipping,
    find_dominating_class,
    find_no_move,
    find_offset,
    find_overfitting,
    find_stuck_embedding,
    gradient_norms,
    has_subspace,
    is_finite,
    no_validation,
    stage_rows,
)
from flowdup.run.folder import Metrics, RunFolder
from flowdup.run.origin import check_clients, listing_of, stored_config
from flowdup.run.simulation import Simulation, is_done

_MOST_CLIENTS = 200  # that are looked at
_GRADIENTS = 20  # clients of whose gradients the norm is taken


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose_run` found."""

    findings: list[Finding]
    unknown: list[str]  # what could not be looked at, and why


def diagnose_run(out: str | Path) -> Diagnosis:
    """Look for known ailments; nothing is written, and a run that still trains may be looked at."""
    folder = RunFolder(Path(out))
    config, rows = stored_config(folder), folder.read_metrics()
    findings = [*_of_losses(rows, folder, config), *_of_stages(rows, config)]
    findings += find_overfitting(rows, config)
    if folder.started:
        spec, state = load_checkpoint(folder.kept)
        findings += [*find_offset(spec.inputs), *find_no_move(state, config)]
    unknown = []
    if config.data.source == MEMORY:
        told = "gradients, embeddings and predictions: the clients were given in Python"
        unknown.append(told)
        if _is_finished(folder, config) and not accuracies(rows):
            findings.append(no_validation(config))
        return Diagnosis(findings, unknown)
    population = load_population(config.data, Stream(config.seed).child("data"))
    check_clients(folder, listing_of(population))
    labeled = [c for c in population.validation if c.labeled]
    if not labeled:
        findings.append(no_validation(config, len(population.validation)))
    findings += _of_gradients(folder, config, population)
    findings += _of_embeddings(folder, population)
    findings += _of_predictions(folder, config, population, labeled[:_MOST_CLIENTS])
    federation = load(folder.path)
    if not federation.method.has_embedding:
        unknown.append(f"the embedding: method '{federation.spec.method['name']}' has none")
    return Diagnosis(findings, unknown)


def _of_losses(rows: Sequence[Metrics], folder: RunFolder, config: Config) -> Iterator[Finding]:
    wrong = [row["round"] for row in rows if not is_finite(row.get("loss"))]
    if wrong:
        yield Finding(
            "loss-not-finite",
            {"rounds": len(wrong), "first_round": wrong[0]},
            f"the loss of {len(wrong)} rounds is not finite, first in round {wrong[0]}",
            "lower client.optimizer.lr and server.optimizer.lr, and set client.clip = 1.0",
        )
    last = rows[-1]["round"] if rows else 0
    if not _is_finished(folder, config):
        yield Finding(
            "unfinished",
            {"round": last, "rounds": config.rounds},
            f"the run has come to round {last} of {config.rounds}",
            "go on with --resume; if training diverged, lower client.optimizer.lr or "
            "server.optimizer.lr in a new folder",
        )


def _is_finished(folder: RunFolder, config: Config) -> bool:
    if not folder.started:
        return False
    state = load_checkpoint(folder.checkpoint)[1]
    return state.stage == len(config.before) and is_done(config, state)


def _of_stages(rows: Sequence[Metrics], config: Config) -> Iterator[Finding]:
    """A first stage, or a model to start from, that is as good as the last stage says that the last
    is not needed.
    """
    best = [
        max((a for _, a in accuracies(stage_rows(rows, number))), default=math.nan)
        for number in range(len(config.stages))
    ]
    larger = ", a larger method.subspace.k" if has_subspace(config.method) else ""
    for number, stage in enumerate(config.before):
        if best[number] >= best[-1]:
            yield Finding(
                "first-stage-as-good",
                {"before": best[number], "last": best[-1]},
                f"'{stage.method.name}', a stage before, reached {best[number]:.1f}% on validation "
                f"clients, and '{config.method.name}' after it {best[-1]:.1f}%",
                f"train '{stage.method.name}' alone, which is simpler, with all that [[before]] "
                f"says of it; or give the last stage more rounds{larger} or clients that differ "
                "more",
            )
    began = [row["start_accuracy"] for row in rows if is_finite(row.get("start_accuracy"))]
    if config.start and not config.before and began and began[0] >= best[-1]:
        yield Finding(
            "start-as-good",
            {"start": began[0], "last": best[-1]},
            f"the model of start = '{config.start}' has {began[0]:.1f}% on validation clients, and "
            f"'{config.method.name}' after it {best[-1]:.1f}%",
            "lower server.optimizer.lr and client.optimizer.lr, or use that model as it is",
        )


def _of_gradients(folder: RunFolder, config: Config, population: Population) -> Iterator[Finding]:
    simulation, state = Simulation.resume(config, folder.kept, population)
    clients = [c for c in population.train[:_MOST_CLIENTS] if c.labeled][:_GRADIENTS]
    with simulation.cores():
        norms = gradient_norms(simulation, state, clients)
    yield from find_clipping(norms, simulation.config.client.clip)


def _of_embeddings(folder: RunFolder, population: Population) -> Iterator[Finding]:
    federation = load(folder.path)
    every = [population.validation, population.test, population.train]
    clients = next((group for group in every if len(group) > 1), [])[:_MOST_CLIENTS]
    if not federation.method.has_embedding or not clients:
        return
    yield from find_stuck_embedding(torch.stack([federation.embedding(c.x) for c in clients]))


def _of_predictions(
    folder: RunFolder, config: Config, population: Population, clients: Sequence[ClientData]
) -> Iterator[Finding]:
    """Of labeled validation clients, by their own models."""
    if not clients:
        return
    simulation, state = Simulation.resume(config, folder.kept, population)
    classes = population.spec.classes
    predicted, truly = torch.zeros(classes), torch.zeros(classes)
    found = []
    for client, logits in zip(
        clients, transductive_logits(simulation.engine, state.deployed, clients), strict=True
    ):
        there = client.labels >= 0
        answers, y = logits.argmax(1).cpu()[there], client.labels[there]
        predicted += torch.bincount(answers, minlength=classes)
        truly += torch.bincount(y, minlength=classes)
        found.append(100 * float((answers == y).double().mean()))
    yield from find_dominating_class(predicted, truly, simulation)
    accuracy, guessing = fmean(found), 100 * float(truly.max() / truly.sum())
    if accuracy <= guessing:
        yield Finding(
            "no-better-than-guessing",
            {"accuracy": accuracy, "guessing": guessing},
            f"accuracy on validation clients is {accuracy:.1f}%, and {guessing:.1f}% of their "
            "labels are of one class",
            "begin with settings that fit the data (flowdup init), more rounds, or another "
            "client.optimizer.lr; inputs must be normalised (data.normalize)",
        )
