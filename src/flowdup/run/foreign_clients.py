"""What a finished run stores to tell foreign clients by (`familiarity.py`), or why it cannot.

Training clients give the summary and validation clients the limits; test clients and those set
aside for a certificate are left alone.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flowdup.checkpoint import load_checkpoint
from flowdup.data import ClientData
from flowdup.errors import ConfigError
from flowdup.familiarity import check_enough, fit_familiarity, store_familiarity
from flowdup.personalize import load, psi_digest
from flowdup.random import Stream
from flowdup.run.folder import RunFolder
from flowdup.run.remote import RemotePopulation
from flowdup.run.simulation import Simulation

_LOG = logging.getLogger(__name__)
_MOST = 500  # training or validation clients that are looked at, evenly spaced among more


def tell_foreign_clients(folder: RunFolder, simulation: Simulation, rate: float) -> None:
    """Store the summary of clients beside the checkpoint that counts, if it is not there already.

    Where it cannot be had, the log says why and `personalize` goes without.
    """
    if not rate:
        return
    try:
        _check_may_tell(simulation, rate)
        federation = load(folder.kept, simulation.device)
        if federation.summary and federation.summary.rate == rate:
            return
        population, stream = simulation.population, simulation.stream.child("familiarity")
        _LOG.info("looking at clients, to tell foreign ones")
        with simulation.cores():
            found = fit_familiarity(
                _inputs(population.train, stream.child("train")),
                _inputs(population.validation, stream.child("validation")),
                federation.embedding,
                rate,
            )
    except ConfigError as error:
        _LOG.info("foreign clients will not be told: %s", error)
        return
    digest = psi_digest(load_checkpoint(folder.kept)[1].deployed)
    store_familiarity(folder.kept, found, digest)


def _check_may_tell(simulation: Simulation, rate: float) -> None:
    population = simulation.population
    if isinstance(population, RemotePopulation):
        raise ConfigError("clients are on other machines, and only psi and its updates leave them")
    if not simulation.method.has_embedding:
        raise ConfigError(f"method '{simulation.config.method.name}' has no embedding of clients")
    if simulation.is_private:
        raise ConfigError("with server.privacy.noise nothing is told of clients without noise")
    check_enough(len(population.train), len(population.validation), rate)


def _inputs(clients: Sequence[ClientData], stream: Stream) -> list[Tensor]:
    """Of `_MOST` of the clients, points in random order: few of them are like any few."""
    step = -(-len(clients) // _MOST)
    found = []
    for i in range(0, len(clients), step):
        x = clients[i].x
        draws = stream.substreams(i, 1, len(x))[0]
        found.append(x[torch.from_numpy(np.argsort(draws, kind="stable"))])
    return found
