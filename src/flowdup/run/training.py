"""Training into a run folder: it can be killed at any moment and continued to the same bits."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flowdup.checkpoint import save_checkpoint
from flowdup.config import Config
from flowdup.data import Population
from flowdup.engines.distributed import is_main_process, wait_for_all
from flowdup.errors import ConfigError
from flowdup.run.folder import Metrics, RunFolder
from flowdup.run.results import write_report
from flowdup.run.simulation import Simulation
from flowdup.server import check_roster
from flowdup.settings import to_toml


def train_run(
    config: Config, out: str | Path, resume: bool = False, population: Population | None = None
) -> Iterator[Metrics]:
    """Train into a run folder and yield every round's metrics.

    Nothing happens until the first round is asked for.  `population` replaces the clients that the
    configuration describes.  Of several processes (torchrun) one writes and yields.
    """
    folder = RunFolder(Path(out))
    started = folder.started
    if started and not resume:
        raise ConfigError(f"{out} holds a run already: add --resume or choose another folder")
    if started:
        _check_continues(config, folder.read_config())
    simulation = Simulation(config, population)
    if started:
        folder.check_clients(simulation.listing())
    state = simulation.load_state(folder.checkpoint) if started else simulation.initial_state()
    check_roster(config.server, simulation.method, simulation.engine.roster)
    wait_for_all()  # until everyone has read what the main process may now change
    if not is_main_process():
        for _ in simulation.rounds(state):
            pass
        return
    folder.write_config(config)
    folder.write_clients(simulation.listing())
    before = folder.cut_metrics(state.round)
    start = time.monotonic() - before
    for latest, metrics in simulation.rounds(state):
        metrics["seconds"] = round(time.monotonic() - start, 3)
        folder.append_metrics(metrics)
        if latest.round % config.run.checkpoint_every == 0 or latest.round == config.server.rounds:
            save_checkpoint(folder.checkpoint, simulation.federation, latest)
        yield metrics
    write_report(folder.path)


def _check_continues(new: Config, old: Config) -> None:
    """A run may go on elsewhere, recorded more often, or with more rounds if no rate hangs on them;
    never as another run.
    """
    fixed = old.server.lr_decay_fraction > 0
    server = old.server if fixed else replace(old.server, rounds=new.server.rounds)
    same = replace(old, server=server, engine=new.engine, run=new.run)
    if same != new:
        a, b = to_toml(same).splitlines(), to_toml(new).splitlines()
        changed = next((line for line in b if line not in a), "a setting")
        raise ConfigError(
            f"the run was started with other settings ('{changed.strip()}' is new): resume with "
            "the old ones or choose another folder"
        )
