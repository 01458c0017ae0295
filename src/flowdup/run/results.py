"""What is made of a trained run: metrics of its test clients, a figure of its clients, a page."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flowdup.data import ClientData, Population, load_population
from flowdup.engines.distributed import is_main_process
from flowdup.errors import ConfigError, DataError
from flowdup.evaluation import Summary, evaluate, evaluate_by_support, metrics_table
from flowdup.personalize import load
from flowdup.provenance import provenance
from flowdup.random import Stream
from flowdup.report import embedding_figure, page
from flowdup.run.folder import RunFolder
from flowdup.run.origin import check_clients, listing_of, stored_config
from flowdup.run.simulation import Simulation

_LOG = logging.getLogger(__name__)
_MOST_IN_A_FIGURE = 10_000  # clients


def evaluate_run(
    out: str | Path, population: Population | None = None, support: Sequence[int] = ()
) -> dict[str, Any]:
    """Personalize every test client from its unlabeled points and score it; writes the result.

    `metrics` is a table by reading and by metric (`evaluation.Summary`); every client has its own
    values under the same names.  `support`, where it is given, has the metrics of models made from
    so many points each (`evaluation.SupportScore`).
    """
    folder = RunFolder(Path(out))
    config = stored_config(folder)
    if population is None:
        _LOG.info("loading the clients of '%s'", config.data.source)
        population = load_population(config.data, Stream(config.seed).child("data"))
        if folder.started:
            check_clients(folder, listing_of(population))
    simulation, state = Simulation.resume(config, folder.kept, population)
    stream = simulation.stream.child("held-out")
    clients = simulation.population.test
    _LOG.info("evaluating %d test clients", len(clients))
    with simulation.cores():
        scores = evaluate(simulation.engine, state.deployed, clients, stream)
    result = {
        "method": simulation.config.method.name,
        "k": simulation.method.k,
        "round": state.round,
        "class_names": list(simulation.population.spec.class_names),
        "metrics": {reading: _plain(table) for reading, table in metrics_table(scores).items()},
        "cost": asdict(simulation.cost(state)),
        "clients": [
            asdict(score) | {"metrics": {r: _finite(own) for r, own in score.metrics.items()}}
            for score in scores
        ],
        **provenance(simulation.device),
    }
    if support:
        with simulation.cores():
            rows = evaluate_by_support(simulation.engine, state.deployed, clients, stream, support)
        result["support"] = [asdict(row) | {"metrics": _plain(row.metrics)} for row in rows]
    if is_main_process():
        folder.write_evaluation(result)
        write_report(folder.path)
    return result


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
    if any(not text.startswith("data.") for text in settings):
        raise ConfigError("only data settings can change here: the federation is trained already")
    federation = load(run.path)
    config = stored_config(run, settings)
    population = load_population(config.data, Stream(config.seed).child("data"))
    if group not in ("train", "validation", "test"):
        raise ConfigError(f"a group is train, validation or test, not '{group}'")
    clients: Sequence[ClientData] = getattr(population, group)
    if not clients:
        raise DataError(f"there are no {group} clients: choose another group")
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
    run.write_report(page(run.read_all()))
    return run.report
