"""Certificates of a trained run: how wrong the models of clients without labels may be."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowdup.certificate.checks import check_delta, check_shares
from flowdup.certificate.own_thresholds import own_levels
from flowdup.certificate.prediction_sets import SetThresholds
from flowdup.checkpoint import load_checkpoint
from flowdup.data import ClientData, Population, load_population
from flowdup.errors import CertificateError, ConfigError
from flowdup.evaluation import transductive_logits
from flowdup.personalize import psi_digest
from flowdup.provenance import provenance
from flowdup.random import Stream
from flowdup.run import certify_prior
from flowdup.run.certified_clients import certifying_clients, with_all_labels
from flowdup.run.certify_pac_bayes import training_rows
from flowdup.run.certify_routes import Answers, Row, held_out_row, quantile_row, set_rows
from flowdup.run.folder import RunFolder
from flowdup.run.origin import check_clients, listing_of, stored_config
from flowdup.run.results import write_report
from flowdup.run.simulation import Simulation
from flowdup.run.trained import Trained

ROUTES = ("held-out-clients", "client-quantile", "prediction-sets", "pac-bayes")
_SHARED = "; clients share images, so it is about new clients made of the images set aside"
_LOG = logging.getLogger(__name__)


def certify_run(
    out: str | Path,
    routes: Sequence[str] = (),
    delta: float = 0.05,
    *,
    coverage: float = 0.9,
    share: float = 0.9,
    draws: int = 1000,
    source: str | Path | None = None,
    population: Population | None = None,
) -> dict[str, Any]:
    """Bound the error of clients without labels, by each route with probability 1 - delta.

    The clients are those that `data.certify_clients` set aside, or those in `source`, which the run
    must never have seen.  `certificate` has a row for each bound (`certify_routes.Row`), `measured`
    the errors that were measured.  Without `routes`, one that cannot be given says why; writes
    certificate.json, from which personal models have their prediction sets.
    """
    check_delta(delta)
    check_shares(coverage=coverage, share=share)
    if unknown := {*routes} - {*ROUTES}:
        raise ConfigError(f"there is no route '{min(unknown)}': choose of {', '.join(ROUTES)}")
    folder = RunFolder(Path(out))
    config = stored_config(folder)
    if population is None:
        _LOG.info("loading the clients of '%s'", config.data.source)
        population = load_population(config.data, Stream(config.seed).child("data"))
        check_clients(folder, listing_of(population))
    aside = certifying_clients(population, config, Path(source) if source else None)
    simulation, state = Simulation.resume(config, folder.kept, population)

    def answers(clients: Sequence[ClientData]) -> Answers | None:
        labeled = [client for client in clients if client.labeled]
        with simulation.cores():
            logits = transductive_logits(simulation.engine, state.deployed, labeled)
        return Answers(logits, labeled) if labeled else None

    _LOG.info("personalizing %d clients that were set aside", len(aside))
    own, test = answers(aside), answers(population.test)
    validation = answers(population.validation)
    assert own is not None
    everyone = with_all_labels(population, config)
    known = everyone or list(population.train)
    hidden = [not client.labeled for client in population.train]
    train = {
        name: answers([c for c, h in zip(known, hidden, strict=True) if h == wanted])
        for name, wanted in (("labeled", False), ("unlabeled", True))
    }
    measured = {
        name: _mean(found) for name, found in (train | {"test": test, "aside": own}).items()
    }
    unlabeled = measured["unlabeled"]
    run = Trained(simulation, config, state.deployed, delta, draws, unlabeled, everyone)
    data, new = f"{len(aside)} clients set aside", measured["test"]
    makers: dict[str, list[Callable[[], Iterator[Row]]]] = {
        "held-out-clients": [lambda: iter([held_out_row(own, new, data, delta)])],
        "client-quantile": [lambda: iter([quantile_row(own, test, data, delta, share)])],
        "prediction-sets": [lambda: set_rows(own, test, validation, data, delta, coverage)],
        "pac-bayes": [
            lambda: iter(()) if config.start else training_rows(run),  # it has seen labels
            lambda: certify_prior.learned_prior_rows(run),
            lambda: iter([certify_prior.same_prior_row(run, aside, new)]),
        ],
    }
    rows: list[Row] = []
    for route in routes or ROUTES:
        _LOG.info("certifying by the route '%s'", route)
        for make in makers[route]:
            with simulation.cores():
                made = _made(make, route, data, delta, strict=bool(routes))
                rows += [row for row in made if row not in rows]  # one refusal is enough
    if config.data.overlap and source is None:
        rows = [replace(r, assumes=r.assumes + _SHARED) if r.data == data else r for r in rows]
    result = {
        "certificate": [asdict(row) for row in rows],
        "measured": measured,
        "method": simulation.config.method.name,
        "round": state.round,
        "psi_sha256": psi_digest(load_checkpoint(folder.kept)[1].deployed),
        "levels": asdict(SetThresholds.of(own.label_scores(own_levels))),
        **provenance(simulation.device),
    }
    folder.write_certificate(result)
    write_report(folder.path)
    return result


def _made(
    make: Callable[[], Iterator[Row]], route: str, data: str, delta: float, strict: bool
) -> Iterator[Row]:
    """The rows; where one is refused, a row that says so, unless the route was asked for."""
    try:
        yield from make()
    except CertificateError as error:
        if strict:
            raise
        yield Row(route, data, None, delta, "", refused=str(error))


def _mean(found: Answers | None) -> float | None:
    return float(np.mean(found.errors)) if found else None
