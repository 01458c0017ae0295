"""What is made of a trained run: metrics of its test clients, a figure of its clients, a page."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flowdup.checkpoint import load_checkpoint
from flowdup.config import override, read_config
from flowdup.data import InputSpec, Population, load_population
from flowdup.data.given_clients import with_columns
from flowdup.engines.distributed import is_main_process
from flowdup.errors import CheckpointError, ConfigError, DataError
from flowdup.evaluation import (
    ClientScore,
    Summary,
    confusion_matrices,
    evaluate,
    evaluate_by_support,
    evaluate_fixed,
    metrics_table,
    percentiles_table,
)
from flowdup.personalize import load, load_model, psi_digest
from flowdup.provenance import provenance
from flowdup.random import Stream
from flowdup.report import embedding_figure, page
from flowdup.run.evaluated_clients import ChosenClients, count_trained_on
from flowdup.run.folder import RunFolder
from flowdup.run.origin import check_clients, listing_of, stored_config
from flowdup.run.simulation import Simulation

_LOG = logging.getLogger(__name__)
_MOST_IN_A_FIGURE = 10_000  # clients


def evaluate_run(
    out: str | Path,
    population: Population | None = None,
    support: Sequence[int] = (),
    *,
    group: str = "",
    source: str | Path | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Personalize every test client from its unlabeled points and score it; writes the result.

    Other clients are scored with `group` (train, validation or test), `source` (a folder, table or
    file of clients, of which `group` may choose) or `settings` (texts `data.KEY=VALUE`); of these
    nothing is written.  `trained_on` says how many of those by `source` or `settings` the run was
    trained on, or None.

    `metrics` is a table by reading and by metric (`evaluation.Summary`), `percentiles` has those
    over clients, `confusion` by reading the points of class i that are taken for class j, and every
    client has its own values.  `support`, where it is given, has the metrics of models made from so
    many points each (`evaluation.SupportScore`).
    """
    folder = RunFolder(Path(out))
    chosen = ChosenClients(group, None if source is None else Path(source), settings)
    config = stored_config(folder)
    if chosen.are_own:
        if population is None:
            _LOG.info("loading the clients of '%s'", config.data.source)
            population = load_population(config.data, Stream(config.seed).child("data"))
            if folder.started:
                check_clients(folder, listing_of(population))
        simulation, state = Simulation.resume(config, folder.kept, population)
        clients = chosen.among(simulation.population)
    elif population is not None:
        raise ConfigError("a population has all clients: give no source or settings beside it")
    else:
        _LOG.info("loading the clients to evaluate")
        spec = load_checkpoint(folder.kept)[0].inputs
        clients = chosen.load(stored_config(folder, settings), spec)
        others = Population(spec, clients, [], clients)  # none of them is trained on
        simulation, state = Simulation.resume(config, folder.kept, others)
    stream = simulation.stream.child("held-out")
    _LOG.info("evaluating %d clients", len(clients))
    with simulation.cores():
        scores = evaluate(simulation.engine, state.deployed, clients, stream)
    result = {
        "method": simulation.config.method.name,
        "k": simulation.method.k,
        "round": state.round,
        **chosen.described(),
        **_tables(scores, simulation.population.spec),
        "cost": asdict(simulation.cost(state)),
        **provenance(simulation.device),
    }
    if not chosen.are_own:
        result["trained_on"] = count_trained_on(clients, folder)
    if support:
        with simulation.cores():
            rows = evaluate_by_support(simulation.engine, state.deployed, clients, stream, support)
        result["support"] = [asdict(row) | {"metrics": _plain(row.metrics)} for row in rows]
    if is_main_process() and chosen.are_default:
        folder.write_evaluation(result)
        write_report(folder.path)
    return result


def evaluate_model(
    path: str | Path,
    source: str | Path | None = None,
    *,
    group: str = "",
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Score a saved personal model, as it is, at every client of a folder, table or file.

    The result is like that of `evaluate_run`, with one reading, `fixed_model`.  Without `source`,
    `settings` name one by `data.source=NAME`; nothing is written.
    """
    chosen = ChosenClients(group, None if source is None else Path(source), settings)
    if source is None and not any(text.startswith("data.source=") for text in settings):
        raise ConfigError(
            f"{path} is a model and has no clients: give some with --input, or with --set "
            "data.source=NAME"
        )
    model = load_model(path)
    clients = chosen.load(read_config(override({}, *settings)), model.inputs)
    scores = evaluate_fixed(model.logits, clients)
    return {
        "model": model.name,
        **chosen.described(),
        **_tables(scores, model.inputs),
        **provenance(torch.device("cpu")),
    }


def _tables(scores: Sequence[ClientScore], spec: InputSpec) -> dict[str, Any]:
    percentiles = {
        reading: {name: _finite(own) for name, own in table.items()}
        for reading, table in percentiles_table(scores).items()
    }
    return {
        "class_names": list(spec.class_names),
        "metrics": {reading: _plain(table) for reading, table in metrics_table(scores).items()},
        "percentiles": percentiles,
        "confusion": confusion_matrices(scores, spec.classes),
        "clients": [
            {
                "name": score.name,
                "traits": score.traits,
                "points": score.points,
                "metrics": {reading: _finite(own) for reading, own in score.metrics.items()},
            }
            for score in scores
        ],
    }


def _plain(table: Mapping[str, Summary]) -> dict[str, dict[str, float | None]]:
    return {name: _finite(asdict(summary)) for name, summary in table.items()}


def _finite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """JSON has no word for infinite: None."""
    return {n: v if v is not None and math.isfinite(v) else None for n, v in values.items()}


def embed_run(
    folder: str | Path,
    by: str = "",
    group: str = "validation",
    out: Path | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Draw the embeddings r(X) of a group of clients, coloured by a trait (rotation, if any).

    The clients are the run's own or, with settings `data.KEY=VALUE`, others.
    """
    run = RunFolder(Path(folder))
    chosen = ChosenClients(group, settings=settings)
    federation = load(run.path)
    config = stored_config(run, settings)
    data = with_columns(config.data, federation.spec.inputs)
    population = load_population(data, Stream(config.seed).child("data"))
    clients = chosen.among(population)
    if len(clients) > _MOST_IN_A_FIGURE:
        raise DataError(
            f"{len(clients):,} clients are too many for a figure: choose another group, or fewer "
            f"with data.{group}_clients"
        )
    traits = sorted({name for client in clients for name in client.traits})
    if by and by not in traits:
        raise DataError(f"clients have no trait '{by}': use one of {', '.join(traits) or '(none)'}")
    by = by or next(iter(sorted(traits, key=lambda trait: trait != "rotation")), "")
    target = out or run.embedding
    measures = embedding_figure(
        torch.stack([federation.embedding(client.x) for client in clients]).numpy(),
        [client.traits.get(by, "") for client in clients],
        ", ".join(filter(None, [by, *settings])),  # the figure says which clients it shows
        target,
    )
    if out is None:
        write_report(run.path)
    return {
        "files": [str(target.with_suffix(end)) for end in (".png", ".svg")],
        "by": by,
    } | measures


def write_report(folder: str | Path) -> Path:
    """Write report.html into a run folder, finished or not, and return its path.

    What cannot be read is named in it; CheckpointError only if there is no such folder.
    """
    run = RunFolder(Path(folder))
    contents = run.read_all()
    counts = _kept_digest(run) if contents.certificate.rows else ""
    run.write_report(page(contents, counts))
    return run.report


def _kept_digest(run: RunFolder) -> str:
    """Of the psi that counts; empty where it cannot be read."""
    try:
        return psi_digest(load_checkpoint(run.kept)[1].deployed)
    except CheckpointError:
        return ""
