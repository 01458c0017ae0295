"""A configuration made ready to run: clients, method, engine, and the rounds that they give."""

import json
import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.nn.utils import get_total_norm

from flowdup.accelerate.host_scalars import HostScalars
from flowdup.checkpoint import FederationSpec, check_state, load_checkpoint
from flowdup.config import Config
from flowdup.cost import Cost, measure
from flowdup.data import LazyClients, Population, load_population
from flowdup.engines import Engine, build_engine
from flowdup.errors import CheckpointError, TrainingError
from flowdup.evaluation import transductive_accuracy
from flowdup.methods import Method, MethodContext, Params
from flowdup.models import Weights
from flowdup.random import Stream
from flowdup.run.folder import Metrics
from flowdup.server import Round, ServerState, initial_state, train

_OTHER = "choose another folder"
_AHEAD = 8  # rounds that a GPU has been given and not yet done


class Simulation:
    """Clients, method and engine of a configuration, for one of its stages: the last, if none is
    named, beginning from weights that a stage before has learned, if they are given.

    Made anew, it is the same to the bit: all that is random comes from the configuration's seed.
    """

    def __init__(
        self,
        config: Config,
        population: Population | None = None,
        stage: int = -1,
        start: Weights | None = None,
    ) -> None:
        stages = config.stages
        self.stage, self.start = stage % len(stages), start or {}
        self.earlier = sum(s.server.rounds for s in stages[: self.stage])
        self.config, self.stream = stages[stage], Stream(config.seed)
        config = self.config
        if population is None:
            population = load_population(config.data, self.stream.child("data"))
        else:
            population = population.checked()
        self.population = population
        self.device, self.dtype = config.engine.torch_device(), config.engine.torch_dtype()
        inputs = self.population.spec
        compute = config.engine.compute_dtype()
        context = MethodContext(
            config.model, inputs, self.stream, self.device, self.dtype, compute, start=start
        )
        self.method: Method = config.method.build(context)
        self.engine: Engine = build_engine(
            config.engine, self.method, config.client, population.train, self.stream
        )
        self.federation = FederationSpec.of(
            config.seed, config.model, config.method.table(), inputs, self.method
        )

    @classmethod
    def resume(
        cls, config: Config, folder: Path, population: Population | None = None
    ) -> "tuple[Simulation, ServerState]":
        """The stage that a checkpoint is of, and its state."""
        spec, state = load_checkpoint(folder)
        if state.stage > len(config.before):
            raise CheckpointError(f"{folder} is of a stage that the settings do not have: {_OTHER}")
        simulation = cls(config, population, state.stage, state.start)
        return simulation, simulation.checked(spec, state)

    @property
    def last_round(self) -> int:
        """Of this stage, in the count of all."""
        return self.earlier + self.config.server.rounds

    def initial_state(self) -> ServerState:
        found = initial_state(self.config.server, self.method, self.stream, self.device, self.dtype)
        return replace(found, round=self.earlier, stage=self.stage, start=self.start)

    def next_stage(self, config: Config, psi: Params) -> "Simulation":
        """The one after this, beginning from the model that psi holds for everyone."""
        start = {n: w.float().cpu() for n, w in self.method.global_model(psi).items()}
        return Simulation(config, self.population, self.stage + 1, start)

    def load_state(self, folder: Path) -> ServerState:
        return self.checked(*load_checkpoint(folder))

    def checked(self, spec: FederationSpec, state: ServerState) -> ServerState:
        """A checkpoint's state, moved here; CheckpointError if it is of another federation."""
        if spec != self.federation:
            spec.check(self.method)
            raise CheckpointError(f"the checkpoint belongs to another federation: {_OTHER}")
        check_state(state, self.method, self.config.server.optimizer)

        def here(tensors: dict[str, Any]) -> dict[str, Any]:
            return {n: t.to(self.device, self.dtype) for n, t in tensors.items()}

        # in the order of `init`: sums over parameters must come out the same, in every process
        psi = {n: state.psi[n] for n in self.federation.psi_names}
        return replace(
            state,
            psi=here(psi),
            optimizer=here(state.optimizer),
            method_state=here(state.method_state),
        )

    def listing(self) -> bytes:
        """Who takes part, as a run folder records it."""
        return json.dumps(self.population.listing()).encode()

    def cost(self, psi: Params) -> Cost:
        """What the method asks of a client of middling size."""
        clients = self.population.train or self.population.test
        if isinstance(clients, LazyClients):
            points = clients.points
        else:
            points = round(statistics.median(map(len, clients)))
        return measure(self.method, self.config.client, self.population.spec, psi, points)

    def rounds(self, state: ServerState) -> Iterator[tuple[ServerState, Metrics]]:
        """Train on from a state; evaluated rounds carry the accuracy of validation clients.

        TrainingError in the first round that leaves a number that is NaN or infinite.  On a GPU
        some more rounds are on their way before the first is read.
        """
        config, waiting = self.config, deque[tuple[Round, HostScalars]]()
        ahead = _AHEAD if self.device.type == "cuda" else 0
        parts = config.server, self.method, self.engine, state, self.stream
        for latest in train(*parts, earlier=self.earlier):
            waiting.append((latest, HostScalars(_numbers(latest) | _magnitudes(latest.state))))
            number = latest.state.round
            due = number % config.run.evaluate_every == 0 or number == self.last_round
            while waiting and (due or len(waiting) > ahead):
                result, numbers = waiting.popleft()
                metrics = _metrics(result, numbers.read())
                if due and result is latest:
                    metrics |= self._validate(result.state.psi)
                yield result.state, metrics

    def _validate(self, psi: Params) -> Metrics:
        clients = self.population.validation
        accuracy = transductive_accuracy(self.engine, psi, clients)
        if accuracy.mean is None:
            return {}
        return {
            "validation_accuracy": accuracy.mean,
            "validation_worst_decile": accuracy.worst_decile,
        }


def _numbers(result: Round) -> Params:
    """The loss, and what was broadcast, as far as it is single numbers."""
    return {"loss": result.loss} | {n: t for n, t in result.broadcast.items() if t.ndim == 0}


def _magnitudes(state: ServerState) -> Params:
    """Sums of all magnitudes: not finite where one number is not.

    A method's own state may have infinite numbers: a lowest loss, before the first.
    """
    groups = {"psi": state.psi, "the server optimizer's state": state.optimizer}
    return {n: get_total_norm([*g.values()], norm_type=1.0) for n, g in groups.items() if g}


def _metrics(result: Round, numbers: dict[str, float]) -> Metrics:
    finite = {n: number if math.isfinite(number) else None for n, number in numbers.items()}
    diverged = [n for n, number in finite.items() if number is None and n not in result.broadcast]
    if diverged:
        raise TrainingError(
            f"training diverged in round {result.state.round}, {diverged[0]} is not finite: lower "
            "client.optimizer.lr or server.optimizer.lr"
        )
    return {
        "round": result.state.round,
        **{name: finite[name] for name in _numbers(result)},
        "padding": round(result.padding, 4),
    }
