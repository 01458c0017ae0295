"""Warnings while a run trains: what `flowdup doctor` would find, once an evaluation shows it."""

import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch

from flowdup.data import ClientData
from flowdup.errors import TrainingWarning
from flowdup.run.findings import (
    Finding,
    find_clipping,
    find_dominating_class,
    find_offset,
    find_overfitting,
    find_stuck_embedding,
    gradient_norms,
    no_validation,
)
from flowdup.run.folder import Metrics
from flowdup.run.remote import RemotePopulation
from flowdup.run.simulation import Simulation
from flowdup.server import ServerState

_EMBEDDINGS, _GRADIENTS = 8, 4  # clients that are looked at
_THROUGHOUT = 3  # evaluations with clipped gradients, from a stage's first on
_EARLY = 20  # rounds of a stage after which predictions and embeddings say nothing yet


class TrainingWatch:
    """Warns once of each ailment; it only reads, so that training has the same bits without it.

    `rows` are the metrics of rounds before those that it will see.  Nobody looked at the gradients
    of these, so a stage that was begun before is not called clipped throughout.
    """

    def __init__(self, rows: Sequence[Metrics] = ()) -> None:
        self.rows, self.told = list(rows), set[str]()
        self.stage, self.evaluations, self.clipped = -1, 0, 0
        self.looked_at_inputs = False
        if evaluated := [row for row in rows if "validation_accuracy" in row]:
            self.stage = int(evaluated[-1].get("stage", 0))
            self.evaluations = sum(row.get("stage", 0) == self.stage for row in evaluated)

    def add(self, simulation: Simulation, state: ServerState, metrics: Metrics) -> None:
        """Look at the round that a simulation has just done, if it was evaluated."""
        self.rows.append(metrics)
        if not self.looked_at_inputs:
            self.looked_at_inputs = True
            self._tell(state, find_offset(simulation.population.spec))
        if "no-validation" not in self.told and _lacks_validation(simulation, metrics):
            self._tell(state, [no_validation(simulation.config)])
        if "validation_accuracy" not in metrics:
            return
        if simulation.stage != self.stage:
            self.stage, self.evaluations, self.clipped = simulation.stage, 0, 0
        self.evaluations += 1
        with simulation.cores():
            findings = list(self._find(simulation, state))
        self._tell(state, findings)

    def _tell(self, state: ServerState, findings: Iterable[Finding]) -> None:
        for found in findings:
            if found.name not in self.told:
                self.told.add(found.name)
                warnings.warn(
                    f"round {state.round}: {found.text}; {found.remedy}",
                    TrainingWarning,
                    stacklevel=5,  # who asked `train_run` for the round
                )

    def _find(self, simulation: Simulation, state: ServerState) -> Iterator[Finding]:
        population, spec = simulation.population, simulation.population.spec
        yield from find_overfitting(self.rows, simulation.config)
        early = state.round - state.began < _EARLY
        if simulation.predicted is not None and not early:
            labels = torch.zeros(spec.classes)
            for client in population.validation:
                labels += torch.bincount(client.labels[client.labels >= 0], minlength=spec.classes)
            yield from find_dominating_class(simulation.predicted, labels, simulation)
        embeds = simulation.method.has_embedding and "stuck-embedding" not in self.told
        if embeds and not early:
            clients = population.validation[:_EMBEDDINGS]
            if len(clients) > 1:
                yield from find_stuck_embedding(_embeddings(simulation, state, clients))
        if self.clipped == self.evaluations - 1 and "clipped-gradients" not in self.told:
            clip = simulation.config.client.clip
            clients = [c for c in population.train[: 5 * _GRADIENTS] if c.labeled][:_GRADIENTS]
            norms = gradient_norms(simulation, state, clients) if clip else []
            for found in find_clipping(norms, clip):
                self.clipped += 1
                if self.clipped >= _THROUGHOUT:
                    yield found


def _lacks_validation(simulation: Simulation, metrics: Metrics) -> bool:
    """Whether what was asked for needs labels of validation clients, and there are none."""
    population, run = simulation.population, simulation.config.run
    if not (run.patience or simulation.method.is_corrected):
        return False
    if isinstance(population, RemotePopulation):  # who has labels shows when they are asked
        return metrics["round"] % run.evaluate_every == 0 and "validation_accuracy" not in metrics
    return not any(client.labeled for client in population.validation)


@torch.no_grad()
def _embeddings(
    simulation: Simulation, state: ServerState, clients: Sequence[ClientData]
) -> torch.Tensor:
    device, dtype = simulation.device, simulation.dtype
    found = []
    for client in clients:
        present = torch.ones(len(client), device=device, dtype=dtype)
        found.append(
            simulation.method.embedding(state.deployed, client.x.to(device), present).cpu()
        )
    return torch.stack(found)
