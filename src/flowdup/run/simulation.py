"""A configuration made ready to run: clients, method, engine, and the rounds that they give."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from flowdup.accelerate.host_scalars import HostScalars
from flowdup.calibration import MOVES, Calibration, calibrate, uncorrected
from flowdup.checkpoint import check_state, load_checkpoint
from flowdup.config import Config
from flowdup.cost import Cost, mean_of_stages, measure
from flowdup.data import ClientData, InputSpec, LazyClients, Population, load_population
from flowdup.devices import one_core
from flowdup.engines import Engine, Roster, build_engine
from flowdup.errors import CheckpointError, ConfigError
from flowdup.evaluation import accuracy_summary, pooled_loss, summarize, transductive_logits
from flowdup.federation_spec import FederationSpec
from flowdup.methods import METHODS, Method, MethodContext, Params
from flowdup.models import Weights
from flowdup.params import pack, unpack
from flowdup.privacy import after_round, check_accountant, epsilon
from flowdup.random import Stream
from flowdup.run.folder import Metrics
from flowdup.run.origin import listing_of
from flowdup.run.remote import RemotePopulation, RemoteStage
from flowdup.run.round_metrics import (
    Validation,
    numbers_of,
    round_metrics,
    validation_metrics,
)
from flowdup.run.start import check_reading, load_prior, load_start
from flowdup.server import (
    BestRound,
    Round,
    ServerState,
    cohort_draws,
    initial_state,
    next_round,
)

_LOG = logging.getLogger(__name__)
_OTHER = "choose another folder"
_AHEAD = 8  # rounds that a GPU has been given and not yet done


def is_done(stage: Config, state: ServerState) -> bool:
    """Whether a stage ends with this state: by its rounds, or because it got no better."""
    patience = stage.run.patience
    stalled = patience and state.best and state.best.misses >= patience
    return bool(stalled) or state.round >= state.began + stage.server.rounds


class Simulation:
    """Clients, method and engine of a configuration, for one of its stages: the last, if none is
    named, beginning from weights that a stage before has learned, if they are given.  The first
    stage reads those that the configuration names.  `reading` gives the inputs' mean and std in
    place of the clients' own.

    Made anew, it is the same to the bit: all that is random comes from the configuration's seed.
    """

    def __init__(
        self,
        config: Config,
        population: Population | None = None,
        stage: int = -1,
        start: Weights | None = None,
        reading: InputSpec | None = None,
    ) -> None:
        stages = self.stages = config.stages
        self.stage, self.start = stage % len(stages), start or {}
        self.config, self.stream = stages[stage], Stream(config.seed)
        config = self.config
        if population is None:
            _LOG.info("loading the clients of '%s'", config.data.source)
            population = load_population(config.data, self.stream.child("data"))
        else:
            population = population.checked()
        # labeled points of validation clients by predicted class [classes], at the last evaluation
        self.predicted: Tensor | None = None
        self.device, self.dtype = config.engine.torch_device(), config.engine.torch_dtype()
        inputs = population.spec.read_as(reading) if reading else population.spec
        _LOG.info("building the model '%s' and the method '%s'", config.model, config.method.name)
        if self.stage == 0 and config.start and not start:
            start, inputs = load_start(Path(config.start), config.model, inputs)
            self.start = start
            if inputs != population.spec:
                check_reading(config.data, config.start, inputs)
                _LOG.info("reading inputs with mean and standard deviation of %s", config.start)
        self.population = population = replace(population, spec=inputs)
        self.method: Method = self._build(config, start)
        self.federation = FederationSpec.of(
            config.seed, config.model, config.method.table(), inputs, self.method
        )
        self.engine: Engine
        if isinstance(population, RemotePopulation):
            interpolates = self.method.interpolates
            described = RemoteStage(config, self.stage, self.federation, self.start, interpolates)
            self.engine = population.connect(described)
        else:
            self.engine = build_engine(
                config.engine,
                self.method,
                config.client,
                population.train,
                self.stream,
                config.server.sees_each,
            )
        self.is_private = check_privacy(stages, self.engine.roster)

    def _build(self, config: Config, start: Weights | None) -> Method:
        compute = config.engine.compute_dtype()
        inputs = self.population.spec
        return config.method.build(
            MethodContext(
                config.model, inputs, self.stream, self.device, self.dtype, compute, start=start
            )
        )

    @classmethod
    def resume(
        cls, config: Config, folder: Path, population: Population | None = None
    ) -> "tuple[Simulation, ServerState]":
        """The stage that a checkpoint is of, and its state."""
        spec, state = load_checkpoint(folder)
        if state.stage > len(config.before):
            raise CheckpointError(f"{folder} is of a stage that the settings do not have: {_OTHER}")
        # as the first stage read them, by what it began from
        reading = spec.inputs if config.start else None
        simulation = cls(config, population, state.stage, state.start, reading)
        return simulation, simulation.checked(spec, state)

    def initial_state(self, before: ServerState | None = None) -> ServerState:
        """Of the stage, after the latest state of the one before."""
        found = initial_state(self.config.server, self.method, self.stream, self.device, self.dtype)
        if self.config.prior and self.stage == 0:
            psi = self._here(load_prior(Path(self.config.prior), self.federation))
            found = replace(found, psi=psi, average={n: psi[n].clone() for n in found.average})
        number, released = (before.round, before.released) if before else (0, ())
        return replace(
            found,
            psi=unpack(pack(found.psi), found.psi),  # where a round leaves it, as in `checked`
            round=number,
            stage=self.stage,
            began=number,
            start=self.start,
            released=released,
        )

    def next_stage(self, config: Config, state: ServerState) -> "Simulation":
        """The one after this, beginning from the model that a state of this holds for everyone."""
        return Simulation(config, self.population, self.stage + 1, self._learned(state))

    def check_later_stages(self, config: Config) -> None:
        """Refuse methods of later stages that cannot be built, as if this had learned nothing."""
        later = config.stages[self.stage + 1 :]
        start = self._learned(self.initial_state()) if later else None
        for stage in later:
            self._build(stage, start)

    def _learned(self, state: ServerState) -> Weights:
        """Of the model for everyone."""
        model = self.method.global_model(self._here(state.deployed))
        return {n: w.float().cpu() for n, w in model.items()}

    def load_state(self, folder: Path) -> ServerState:
        """The state in a checkpoint folder, checked as `checked` does it."""
        return self.checked(*load_checkpoint(folder))

    def checked(self, spec: FederationSpec, state: ServerState) -> ServerState:
        """A checkpoint's state, moved here; CheckpointError if it is of another federation."""
        if not self.federation.is_same(spec):
            spec.check(self.method)
            raise CheckpointError(f"the checkpoint belongs to another federation: {_OTHER}")
        check_state(state, self.method, self.config.server)
        if self.is_private and sum(rounds.rounds for rounds in state.released) < state.round:
            raise CheckpointError(
                "the checkpoint does not say of how many clients its cohorts were drawn, and no "
                f"epsilon could be told: {_OTHER}"
            )
        # in the order of `init`: sums over parameters must come out the same, in every process
        names = self.federation.psi_names
        psi = self._here({n: state.psi[n] for n in names})
        return replace(
            state,
            # as a round leaves it: bits of a product depend on where in memory its factors begin
            psi=unpack(pack(psi), psi),
            optimizer=self._here(state.optimizer),
            method_state=self._here(state.method_state),
            average=self._here({n: state.average[n] for n in names if state.average}),
            correction=self._here(state.correction),
        )

    def _here(self, tensors: Params) -> Params:
        return {n: t.to(self.device, self.dtype) for n, t in tensors.items()}

    def listing(self) -> bytes:
        """Who takes part, as a run folder records it."""
        return listing_of(self.population)

    def cost(self, state: ServerState) -> Cost:
        """What the method, and those of the stages before, ask of a client of middling size."""
        clients = self.population.train or self.population.test
        if isinstance(clients, LazyClients):
            points = clients.points
        else:
            points = round(statistics.median(map(len, clients)))
        spec, found = self.population.spec, []
        stages = self.stages[: self.stage + 1]
        for number, stage in enumerate(stages[:-1]):
            method = self._build(stage, state.start if number or stage.start else None)
            psi = self._here(method.init(self.stream))
            found.append(measure(method, stage.client, spec, psi, points))
        found.append(measure(self.method, self.config.client, spec, state.psi, points))
        mean = mean_of_stages(found, [stage.server.rounds for stage in stages])
        return replace(mean, bytes_once=sum(w.numel() * 4 for w in state.start.values()))

    def rounds(self, state: ServerState) -> Iterator[tuple[ServerState, Metrics]]:
        """Train on from a state; evaluated rounds carry the accuracy of validation clients.

        TrainingError in the first round that leaves a number that is NaN or infinite.  On a GPU
        some more rounds are on their way before the first is read.
        """
        config, waiting = self.config, deque[tuple[Round, HostScalars]]()
        ahead = _AHEAD if self.device.type == "cuda" else 0
        last = state.began + config.server.rounds
        while state.round < last:
            with self.cores():
                latest = next_round(config.server, self.method, self.engine, state, self.stream)
            if self.is_private and isinstance(self.population, RemotePopulation):
                latest = replace(latest, state=_counted(self.population, latest.state))
            waiting.append((latest, HostScalars(numbers_of(latest))))
            state = latest.state
            due = state.round % config.run.evaluate_every == 0 or state.round == last
            while waiting and (due or len(waiting) > ahead):
                result, numbers = waiting.popleft()
                metrics = round_metrics(result, numbers.read())
                if isinstance(self.population, RemotePopulation):
                    metrics |= self.population.traffic()
                if self.is_private:
                    metrics["epsilon"] = round(self.epsilon(result.state), 4)
                if due and result is latest:
                    state, found = self.evaluated(state)
                    metrics |= validation_metrics(found)
                yield (state if result is latest else result.state), metrics

    def evaluated(self, state: ServerState) -> tuple[ServerState, Validation]:
        """A state that knows how good it is for validation clients, with the correction fitted."""
        with self.cores():
            found = self._validate(state)
        state, accuracy = replace(state, correction=found.correction), found.accuracies.mean
        if accuracy is not None:
            new = BestRound(state.round, accuracy, 0, found.loss)
            best = state.best.after(state.round, accuracy, found.loss) if state.best else new
            if state.round - state.began <= self.config.server.warm_up:  # too early for patience
                best = replace(best, misses=0)
            state = replace(state, best=best)
        return state, found

    def epsilon(self, state: ServerState) -> float:
        """What training up to a state costs a client of privacy, at `server.privacy.delta`."""
        return epsilon(state.released, self.config.server.privacy.delta)

    def cores(self) -> AbstractContextManager[None]:
        """What work has to be done in: on a CPU, one core beside those that the engine uses."""
        return one_core() if self.device.type == "cpu" else nullcontext()

    def _validate(self, state: ServerState) -> Validation:
        if isinstance(self.population, RemotePopulation):
            return self._validate_remotely(self.population, state)
        labeled = [c for c in self.population.validation if c.labeled]
        if not labeled or not self.method.is_corrected:
            found = transductive_logits(self.engine, state.deployed, labeled)
            self.predicted = self._count_predictions(found, labeled)
            return Validation(accuracy_summary(found, labeled), pooled_loss(found, labeled), {})
        logits = {}
        for move in MOVES if self.method.interpolates else (1.0,):
            plain = self._here(uncorrected(self.population.spec.classes, move))
            params = replace(state, correction=plain).deployed
            logits[move] = transductive_logits(self.engine, params, labeled)
        best = calibrate(logits, [c.y for c in labeled if c.y is not None], self.device)
        return self._with(best)

    def _validate_remotely(self, population: RemotePopulation, state: ServerState) -> Validation:
        if not self.method.is_corrected:
            told = population.accuracies(state.round, state.deployed)
            return Validation(summarize(told), math.inf, {})
        best = population.calibrate(state.round, replace(state, correction={}).deployed)
        return self._with(best) if best else Validation(summarize([]), math.inf, {})

    def _with(self, best: Calibration) -> Validation:
        self.predicted = best.predicted
        correction = self._here(best.correction)
        return Validation(summarize(best.accuracies.tolist()), best.loss, correction)

    def _count_predictions(self, logits: Sequence[Tensor], clients: Sequence[ClientData]) -> Tensor:
        counts = torch.zeros(self.population.spec.classes, dtype=torch.int64)
        for own, client in zip(logits, clients, strict=True):
            counts += torch.bincount(own.argmax(1)[client.labels >= 0], minlength=len(counts))
        return counts


def check_privacy(stages: Sequence[Config], roster: Roster) -> bool:
    """Whether rounds have noise; ConfigError where those of one stage have and of another have
    none, or epsilon would mean nothing.
    """
    noisy = [bool(s.server.privacy.noise) for s in stages]
    if not any(noisy):
        return False
    deltas = {s.server.privacy.delta for s in stages}
    if not all(noisy) or len(deltas) > 1:
        raise ConfigError(
            "all stages must have server.privacy.noise above 0 and the same server.privacy.delta, "
            "or none of them any noise: what one stage gives away, no other takes back"
        )
    for each in stages:
        learns = METHODS[each.method.name].method.learns_unlabeled
        check_accountant(each.server.privacy.delta, cohort_draws(each.server, roster, learns))
    return True


def _counted(population: RemotePopulation, state: ServerState) -> ServerState:
    """With every psi that was sent out for the state's round: where a run was ended before its
    checkpoint, and the round is done again to another psi, both were seen.
    """
    released = state.released
    latest = released[-1]._replace(rounds=1)
    for other in population.note_release(state.round, state.psi, latest):
        released = after_round(released, other.noise, other.parts)
    return replace(state, released=released)
