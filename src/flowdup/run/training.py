"""Training into a run folder: it can be killed at any moment and continued to the same bits."""

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

from flowdup.checkpoint import remove_old_tensors, save_checkpoint
from flowdup.config import Config
from flowdup.data import Population
from flowdup.engines.distributed import any_process, is_main_process, wait_for_all
from flowdup.errors import ConfigError
from flowdup.methods import METHODS
from flowdup.run.folder import Metrics, RunFolder
from flowdup.run.lock import locked
from flowdup.run.origin import check_clients, check_settings, origin_of, with_absolute_data_path
from flowdup.run.results import write_report
from flowdup.run.simulation import Simulation
from flowdup.server import ServerState, check_roster


def train_run(
    config: Config,
    out: str | Path,
    resume: bool = False,
    population: Population | None = None,
    stop: Callable[[], bool] | None = None,
) -> Generator[Metrics, None, bool]:
    """Train into a run folder and yield every round's metrics.

    Nothing happens until the first round is asked for; then the folder is locked against other
    trainings until the end.  `population` replaces the clients that the configuration describes.
    `stop` is asked before the first round and after each: if it says so, the round is saved and
    training ends.  Of several processes (torchrun) one writes and yields; one that is to stop stops
    all.  The generator returns, in every process, whether training was stopped with rounds left.
    """
    folder, writes = RunFolder(Path(out)), is_main_process()
    config = with_absolute_data_path(config)
    with ExitStack() as held:
        exists = folder.path.exists()
        if writes and exists:
            held.enter_context(locked(folder))
            _check_may_train(folder, config, resume)
        simulation = Simulation(config, population, stage=0)
        for stage in config.stages:
            learns_unlabeled = METHODS[stage.method.name].method.learns_unlabeled
            check_roster(stage.server, learns_unlabeled, simulation.engine.roster)
        if writes and not exists:  # not before: what is refused leaves no folder behind
            held.enter_context(locked(folder))
            _check_may_train(folder, config, resume)
        wait_for_all()  # nobody reads before the folder is locked
        simulation, state = _start(folder, config, simulation)
        if writes:
            return (yield from _train_and_write(folder, config, simulation, state, stop))
        wait_for_all()  # the main process may now change what everyone has read
        stopped = _stops(stop) and state.round < config.rounds
        if not stopped:
            for _, latest, _ in _rounds(config, simulation, state):
                if latest.round < config.rounds and _stops(stop):
                    stopped = True
                    break
        wait_for_all()  # until all is saved: torchrun ends everyone when one ends
        return stopped


def _rounds(
    config: Config, simulation: Simulation, state: ServerState
) -> Iterator[tuple[Simulation, ServerState, Metrics]]:
    """Of all stages from this one on."""
    latest = state
    while True:
        for latest, metrics in simulation.rounds(latest):
            yield simulation, latest, metrics
        if latest.round == config.rounds:
            return
        simulation = simulation.next_stage(config, latest.psi)
        latest = simulation.initial_state()


def _train_and_write(
    folder: RunFolder,
    config: Config,
    simulation: Simulation,
    state: ServerState,
    stop: Callable[[], bool] | None,
) -> Generator[Metrics, None, bool]:
    listing = simulation.listing()
    origin = origin_of(config, listing)
    if folder.started:
        check_clients(folder, listing)
    wait_for_all()  # until everyone has read what is now changed
    if folder.started:
        remove_old_tensors(folder.checkpoint)
    else:  # first of all: other files without a checkpoint are a damaged run
        save_checkpoint(folder.checkpoint, simulation.federation, state, origin)
    folder.write_clients(listing)
    folder.write_config(config)
    start = time.monotonic() - folder.cut_metrics(state.round)
    stopped = _stops(stop) and state.round < config.rounds
    rounds = iter(()) if stopped else _rounds(config, simulation, state)
    for stage, latest, metrics in rounds:
        metrics["seconds"] = round(time.monotonic() - start, 3)
        folder.append_metrics(metrics)
        due = latest.round % config.run.checkpoint_every == 0
        last = latest.round == config.rounds
        if due or latest.round == stage.last_round:
            folder.sync_metrics()
            save_checkpoint(folder.checkpoint, stage.federation, latest, origin)
        yield metrics
        if not last and _stops(stop):
            if not due:
                folder.sync_metrics()
                save_checkpoint(folder.checkpoint, stage.federation, latest, origin)
            stopped = True
            break
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


def _start(
    folder: RunFolder, config: Config, simulation: Simulation
) -> tuple[Simulation, ServerState]:
    """The stage to go on with, and from where; `simulation` is the first's."""
    if not folder.started:
        return simulation, simulation.initial_state()
    simulation, state = Simulation.resume(config, folder.checkpoint, simulation.population)
    if state.round > simulation.last_round:
        trained, rounds = state.round - simulation.earlier, simulation.config.server.rounds
        raise ConfigError(
            f"{folder.path} was trained for {trained} rounds and server.rounds is {rounds}: "
            f"set it to {trained} or more, or choose another folder"
        )
    return simulation, state


def _stops(stop: Callable[[], bool] | None) -> bool:
    return stop is not None and any_process(stop())
