"""Training into a run folder: it can be killed at any moment and continued to the same bits."""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from flowdup.checkpoint import (
    has_checkpoint,
    remove_checkpoint,
    remove_old_tensors,
    save_checkpoint,
)
from flowdup.config import Config
from flowdup.data import Population, load_population
from flowdup.engines import Roster
from flowdup.engines.distributed import (
    any_process,
    connect_processes,
    is_main_process,
    wait_for_all,
)
from flowdup.errors import CheckpointError, ConfigError
from flowdup.familiarity import remove_familiarity
from flowdup.methods import METHODS, Method
from flowdup.random import Stream
from flowdup.run.folder import Metrics, RunFolder
from flowdup.run.foreign_clients import tell_foreign_clients
from flowdup.run.lock import locked
from flowdup.run.origin import (
    check_clients,
    check_settings,
    listing_of,
    origin_of,
    with_absolute_paths,
    with_given_clients,
)
from flowdup.run.remote import RemotePopulation
from flowdup.run.results import write_report
from flowdup.run.round_metrics import validation_metrics
from flowdup.run.simulation import Simulation, is_done
from flowdup.run.tensorboard import TensorBoardLog, check_installed, tensorboard_log
from flowdup.run.watch import TrainingWatch
from flowdup.server import ServerState, check_roster

_LOG = logging.getLogger(__name__)


def train_run(
    config: Config,
    out: str | Path,
    resume: bool = False,
    population: Population | None = None,
    stop: Callable[[], bool] | None = None,
) -> Generator[Metrics, None, bool]:
    """Train into a run folder and yield every round's metrics.

    Nothing happens until the first round is asked for; then the folder is locked against other
    trainings until the end.  `population` replaces the clients that the configuration describes;
    the run folder says so, and does not hold them.
    `stop` is asked before the first round and after each: if it says so, the round is saved and
    training ends.  Of several processes (torchrun) one writes and yields; one that is to stop stops
    all.  The generator returns, in every process, whether training was stopped with rounds left.
    What a run suffers from is told by a `TrainingWarning`, once each (`watch.py`).
    """
    folder, writes = RunFolder(Path(out)), is_main_process()
    config = with_absolute_paths(config if population is None else with_given_clients(config))
    check_installed(config.run.log)
    with ExitStack() as held:
        exists = folder.path.exists()
        if writes and exists:
            held.enter_context(locked(folder))
            _check_may_train(folder, config, resume)
        if population is None:
            _LOG.info("loading the clients of '%s'", config.data.source)
            population = load_population(config.data, Stream(config.seed).child("data"))
        if writes and folder.started:  # first of all: other clients' inputs have another mean
            check_clients(folder, listing_of(population.checked()))
        fresh = None if folder.started else Simulation(config, population, stage=0)
        _check_stages(config, population)
        if fresh:
            fresh.check_later_stages(config)
        if writes and not exists:  # not before: what is refused leaves no folder behind
            held.enter_context(locked(folder))
            _check_may_train(folder, config, resume)
        connect_processes(config.engine.torch_device())
        wait_for_all()  # nobody reads before the folder is locked
        progress = _start(folder, config, population, fresh)
        if writes:
            log = tensorboard_log(folder.path, config.run.log, progress.state.round)
            return (yield from _train_and_write(folder, progress, held.enter_context(log), stop))
        wait_for_all()  # the main process may now change what everyone has read
        stopped = _stops(stop) and not progress.finished
        if not stopped:
            for _ in progress.rounds():
                if not progress.finished and _stops(stop):
                    stopped = True
                    break
        wait_for_all()  # until all is saved: torchrun ends everyone when one ends
        return stopped


@dataclass
class _Progress:
    """Where a run is: its settings, the stage that it is in, and that stage's latest state."""

    config: Config
    simulation: Simulation
    state: ServerState
    kept: ServerState | None = None  # that the next stage begins from; None: the latest
    start: Metrics = field(default_factory=dict)  # of the stage, until its first round is told

    def evaluate_start(self) -> None:
        """Before a stage's first round.  A stage that begins from a model may end up no better, so
        its start is among the rounds of which the best may be kept.
        """
        if not self.simulation.start:
            return
        _LOG.info("evaluating what the stage begins from")
        found, validation = self.simulation.evaluated(replace(self.state, best=None, correction={}))
        self.start = validation_metrics(validation, at_start=True)
        if self.state.best is None:  # or it was saved
            self.state = found
            self.kept = found if self.is_kept else None

    @property
    def stage_done(self) -> bool:
        return is_done(self.simulation.config, self.state)

    @property
    def finished(self) -> bool:
        return self.simulation.stage == len(self.config.before) and self.stage_done

    @property
    def is_kept(self) -> bool:
        """Whether the latest round is the stage's best so far, and that is to be kept."""
        best = self.state.best if self.config.run.keep == "best" else None
        return best is not None and best.round == self.state.round

    def rounds(self, begun: Callable[[], None] = lambda: None) -> Iterator[Metrics]:
        """Train on to the end of the last stage, keeping this up to date; `begun` is called when
        another stage has begun.
        """
        while not self.finished:
            if self.stage_done:
                self.simulation = self.simulation.next_stage(self.config, self.kept or self.state)
                self.state, self.kept = self.simulation.initial_state(self.state), None
                self.evaluate_start()
                begun()
            engine, on_gpu = self.config.engine, self.simulation.device.type == "cuda"
            compiles = " (compiling it, up to a minute)" if on_gpu and engine.compile else ""
            _LOG.info("training the first round%s", compiles)
            for state, metrics in self.simulation.rounds(self.state):
                self.state = state
                if self.is_kept:
                    self.kept = self.state
                if self.config.before:
                    metrics["stage"] = self.state.stage
                yield metrics | self.start
                self.start = {}
                if self.stage_done:
                    break


def _train_and_write(
    folder: RunFolder, progress: _Progress, log: TensorBoardLog, stop: Callable[[], bool] | None
) -> Generator[Metrics, None, bool]:
    config, listing = progress.config, progress.simulation.listing()
    origin = origin_of(config, listing)

    def save(path: Path) -> None:
        save_checkpoint(path, progress.simulation.federation, progress.state, origin)

    def save_both() -> None:  # in the order that a kill between the two can be mended in
        save(folder.checkpoint)
        if progress.is_kept:
            save(folder.best)

    wait_for_all()  # until everyone has read what is now changed
    if folder.started:
        remove_old_tensors(folder.checkpoint)
    else:  # first of all: other files without a checkpoint are a damaged run
        save(folder.checkpoint)
    if config.run.keep == "last":
        remove_familiarity(folder.best)
        remove_checkpoint(folder.best)
    elif progress.is_kept:  # a start, or a kill came between the two
        save(folder.best)
    folder.write_clients(listing)
    folder.write_config(config)
    start = time.monotonic() - folder.cut_metrics(progress.state.round)
    if progress.finished:
        _LOG.info("%s is finished, after round %d", folder.path, progress.state.round)
    watch = TrainingWatch(folder.read_metrics())
    stopped = _stops(stop) and not progress.finished
    rounds = iter(()) if stopped or progress.finished else progress.rounds(save_both)
    for metrics in rounds:
        metrics["seconds"] = round(time.monotonic() - start, 3)
        folder.append_metrics(metrics)
        log.add(metrics)
        due = progress.state.round % config.run.checkpoint_every == 0 or progress.stage_done
        saved = due or progress.is_kept
        if saved:
            folder.sync_metrics()
            save_both()
        watch.add(progress.simulation, progress.state, metrics)
        yield metrics
        if not progress.finished and _stops(stop):
            if not saved:
                folder.sync_metrics()
                save(folder.checkpoint)
            stopped = True
            break
    if progress.finished:
        tell_foreign_clients(folder, progress.simulation, config.run.false_alarms)
    write_report(folder.path)
    wait_for_all()
    return stopped


def _check_may_train(folder: RunFolder, config: Config, resume: bool) -> None:
    folder.check_not_damaged()
    if folder.started and not resume:
        raise ConfigError(
            f"{folder.path} holds a run already: add --resume or choose another folder"
        )
    if folder.started:
        check_settings(folder, config)


def _check_stages(config: Config, population: Population) -> None:
    """Refuse stages that cannot follow each other or have no clients, before one is trained."""
    stages = config.stages
    if isinstance(population, RemotePopulation):
        roster = population.roster
    else:
        roster = Roster.of(population.train)
    for number, stage in enumerate(stages, 1):
        method = METHODS[stage.method.name].method
        check_roster(stage.server, method.learns_unlabeled, roster)
        if number < len(stages) and method.global_model is Method.global_model:
            raise ConfigError(
                f"in [[before]] number {number}: method '{stage.method.name}' learns no model for "
                "everyone, from which the next stage could begin: make it the last stage"
            )


def _start(
    folder: RunFolder, config: Config, population: Population, fresh: Simulation | None
) -> _Progress:
    """Where to go on, or the beginning of a fresh run."""
    if fresh:
        progress = _Progress(config, fresh, fresh.initial_state())
        progress.evaluate_start()
        return progress
    simulation, state = Simulation.resume(config, folder.checkpoint, population)
    trained, rounds = state.round - state.began, simulation.config.server.rounds
    if trained > rounds:
        raise ConfigError(
            f"{folder.path} was trained for {trained} rounds and server.rounds is {rounds}: "
            f"set it to {trained} or more, or choose another folder"
        )
    progress = _Progress(config, simulation, state, _kept(folder, simulation, state))
    if not trained:
        progress.evaluate_start()  # again: it is told with the first round
    return progress


def _kept(folder: RunFolder, simulation: Simulation, state: ServerState) -> ServerState | None:
    """The stage's best round so far, if that is to be kept; CheckpointError if it is not there."""
    if simulation.config.run.keep == "last" or not state.best:
        return None
    if state.best.round == state.round:
        return state
    if has_checkpoint(folder.best):
        best = simulation.load_state(folder.best)
        if (best.stage, best.round) == (state.stage, state.best.round):
            return best
    instead = "" if simulation.config.before else ", or go on with run.keep = 'last'"
    raise CheckpointError(
        f"{folder.best} does not hold round {state.best.round}, the best so far: restore it from a "
        f"copy{instead}"
    )


def _stops(stop: Callable[[], bool] | None) -> bool:
    return stop is not None and any_process(stop())
