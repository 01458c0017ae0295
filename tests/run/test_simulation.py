"""Rounds of a simulation: watched for numbers that are not finite, and apart from all else that is
random in the process.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from small import METHODS, client, population

import flowdup
from flowdup.checkpoint import load_checkpoint
from flowdup.config import Config, read_config
from flowdup.errors import TrainingError
from flowdup.methods import Deployed, Params, register_method
from flowdup.methods.fedavg import FedAvg
from flowdup.run import RunFolder, Simulation, embed_run, evaluate_run
from flowdup.settings import plain


def config(**changes: Any) -> Config:
    return read_config(
        {
            "model": "cnn-small",
            "method": METHODS["flowdup"],
            "client": {"batch_size": 10, "optimizer": {"lr": 0.05}},
            "server": {"rounds": 3, "cohort": 4},
        }
        | changes
    )


DIVERGING = {
    "loss": {  # psi is finite after round 1 and gives an infinite loss in round 2
        "server": {"rounds": 9, "cohort": 4, "optimizer": {"name": "sgd", "lr": 1e30}},
    },
    "psi": {
        "client": {"batch_size": 100, "optimizer": {"lr": 1e30}},
        "server": {"rounds": 9, "cohort": 4, "optimizer": {"name": "sgd", "lr": 1e30}},
    },
    "the server optimizer's state": {  # Adam divides by it: psi would stand still, finite
        "client": {"batch_size": 100, "optimizer": {"lr": 1e30}},
        "server": {"rounds": 9, "cohort": 4, "optimizer": {"name": "adam", "lr": 1e-3}},
    },
}


@pytest.mark.parametrize("what", DIVERGING)
@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_the_first_round_that_diverges_is_named_and_nothing_of_it_is_kept(
    tmp_path: Path, what: str, engine: str
) -> None:
    first = 2 if what == "loss" else 1
    every = {"checkpoint_every": 1, "evaluate_every": 5}
    made = config(method={"name": "fedavg"}, engine={"name": engine}, run=every, **DIVERGING[what])
    with pytest.raises(TrainingError, match=f"diverged in round {first}, {what} is not finite"):
        list(flowdup.train_run(made, tmp_path, population=population()))
    folder = RunFolder(tmp_path)
    lines = folder.metrics.read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["round"] for row in rows] == list(range(1, first))
    if first > 1:
        _, state = load_checkpoint(folder.checkpoint)
        assert state.round == first - 1
        assert all(torch.isfinite(p).all() for p in state.psi.values())


def global_states() -> tuple[object, ...]:
    name, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), name, list(words), rest, random.getstate()


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_whole_run_neither_reads_nor_moves_a_global_random_state(
    tmp_path: Path, engine: str
) -> None:
    psi, people = [], population()
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before, out = global_states(), tmp_path / str(seed)
        list(flowdup.train_run(config(engine={"name": engine}), out, population=people))
        evaluate_run(out, people)
        federation = flowdup.load(out)
        federation.personalizer(client(30, 7).x)(client(30, 7).x)
        federation.personalize(client(30, 7).x).predict(client(30, 7).x)
        assert global_states() == before
        psi.append(federation.psi)
    assert all(torch.equal(psi[0][n], p) for n, p in psi[1].items())


def test_the_figure_of_clients_moves_no_global_random_state(tmp_path: Path) -> None:
    small = ["server.rounds=1", "server.cohort=2", "data.train_clients=4", "data.test_clients=4"]
    made = flowdup.load_config(
        "digits", [*small, "data.validation_clients=6", "method.subspace.k=50"]
    )
    list(flowdup.train_run(made, tmp_path))
    before = global_states()
    embed_run(tmp_path)
    assert global_states() == before


def test_simulations_and_loads_in_eight_threads_begin_where_one_begins(tmp_path: Path) -> None:
    people = population()
    list(flowdup.train_run(config(), tmp_path, population=people))
    wanted = Simulation(config(), people)
    start, trained = wanted.initial_state().psi, flowdup.load(tmp_path).psi

    def again(number: int) -> bool:
        if number % 2:
            psi, same = flowdup.load(tmp_path).psi, trained
        else:
            simulation = Simulation(config(), people)
            assert simulation.federation == wanted.federation
            psi, same = simulation.initial_state().psi, start
        return all(torch.equal(psi[n], p) for n, p in same.items())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(again, range(48)))


class Hopeful(FedAvg):
    """Broadcasts the lowest loss so far, infinite before the first round."""

    broadcast = ("lowest",)

    def server_state(self) -> Params:
        return {"lowest": torch.tensor(torch.inf)}

    def update_server_state(self, state: Params, loss: torch.Tensor, deployed: Deployed) -> Params:
        return {"lowest": torch.minimum(state["lowest"], loss)}


def test_what_a_method_does_not_know_yet_is_no_divergence(tmp_path: Path) -> None:
    register_method("hopeful", Hopeful)
    made = config(method={"name": "hopeful"})
    rows = list(flowdup.train_run(made, tmp_path, population=population()))
    lowest = [min(row["loss"] for row in rows[:n]) for n in (1, 2)]
    assert [row["lowest"] for row in rows] == [None, *lowest]


class Watching(FedAvg):
    """Notes how many cores the server's own work has."""

    seen: ClassVar[list[int]] = []

    def update_server_state(self, state: Params, loss: torch.Tensor, deployed: Deployed) -> Params:
        self.seen.append(torch.get_num_threads())
        return state


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_on_a_cpu_the_servers_work_has_one_core_and_others_get_theirs_back(engine: str) -> None:
    register_method("watching", Watching)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        table = plain(config(method={"name": "watching"}))
        table["engine"]["name"] = engine
        simulation = Simulation(read_config(table), population())
        for _ in simulation.rounds(simulation.initial_state()):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(Watching.seen) == {1}
