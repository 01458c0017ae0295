import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import METHODS as METHOD_SETTINGS
from small import SPEC, STREAM, engine, method, population
from torch import Tensor

from flowdup.client import ClientConfig
from flowdup.config import merge, read_config
from flowdup.engines import Roster, SupportQuery
from flowdup.errors import ConfigError, TrainingError
from flowdup.messages import Reply, Task
from flowdup.methods import METHODS, MethodConfig, MethodContext, Params, register_method
from flowdup.methods.fedavg import FedAvg
from flowdup.optimizers import OptimizerConfig
from flowdup.privacy import Draw
from flowdup.random import Stream
from flowdup.run import train_run
from flowdup.server import ServerConfig, cohort_draws, initial_state, sample_cohort, train


def roster(yes: int, no: int) -> Roster:
    return Roster(np.arange(yes), np.arange(yes, yes + no))


@given(
    st.integers(1, 30), st.integers(0, 30), st.integers(1, 40), st.floats(0, 1), st.integers(0, 99)
)
def test_a_cohort_has_its_labeled_share(
    yes: int, no: int, size: int, alpha: float, seed: int
) -> None:
    config = ServerConfig(cohort=size, alpha=alpha)
    cohort = sample_cohort(config, roster(yes, no), True, Stream(seed))
    assert len(cohort) == size
    share = max(round(alpha * size), 1 if alpha else 0)  # not rounded away in a small cohort
    assert sum(i < yes for i in cohort) == (share if no else size)
    assert all(0 <= i < yes + no for i in cohort)


@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 99))
def test_a_method_of_labels_alone_gets_labeled_clients_alone(yes: int, no: int, seed: int) -> None:
    cohort = sample_cohort(ServerConfig(cohort=20), roster(yes, no), False, Stream(seed))
    assert len(cohort) == 20 and max(cohort) < yes


@given(st.integers(10, 30), st.integers(10, 30), st.integers(0, 99))
def test_without_replacement_nobody_stands_twice(yes: int, no: int, seed: int) -> None:
    config = ServerConfig(cohort=20, alpha=0.5, replacement=False)
    cohort = sample_cohort(config, roster(yes, no), True, Stream(seed))
    assert len(set(cohort)) == 20


def test_with_replacement_few_labeled_clients_fill_a_large_cohort() -> None:
    cohort = sample_cohort(ServerConfig(cohort=100), roster(5, 50), True, Stream(0))
    assert set(cohort[:90]) == {0, 1, 2, 3, 4}


def test_without_replacement_too_few_clients_are_an_error_with_a_remedy() -> None:
    config = ServerConfig(cohort=100, replacement=False)
    with pytest.raises(ConfigError, match=r"90 labeled clients and there are 5: lower"):
        sample_cohort(config, roster(5, 50), True, Stream(0))


@given(
    st.integers(1, 30), st.integers(0, 30), st.integers(1, 40), st.floats(0, 1), st.integers(0, 99)
)
def test_two_ranges_with_replacement_give_the_cohort_of_an_array(
    yes: int, no: int, size: int, alpha: float, seed: int
) -> None:
    config, ranges = (
        ServerConfig(cohort=size, alpha=alpha),
        Roster(range(yes), range(yes, yes + no)),
    )
    found, array = (
        sample_cohort(config, who, True, Stream(seed)) for who in (ranges, roster(yes, no))
    )
    assert found == array


@given(st.integers(10, 30), st.integers(10, 30), st.integers(0, 99))
def test_nobody_stands_twice_in_a_cohort_of_ranges(yes: int, no: int, seed: int) -> None:
    config = ServerConfig(cohort=20, alpha=0.5, replacement=False)
    cohort = sample_cohort(config, Roster(range(yes), range(yes, yes + no)), True, Stream(seed))
    assert len(set(cohort)) == 20
    assert sum(i < yes for i in cohort) == 10 and max(cohort) < yes + no


@pytest.mark.parametrize("replacement", [True, False])
def test_a_cohort_of_a_billion_clients_takes_no_more_memory_than_one_of_few(
    replacement: bool,
) -> None:
    config = ServerConfig(cohort=1000, replacement=replacement)
    peaks = []
    for clients in (10**4, 10**9):
        groups = Roster(range(clients // 2), range(clients // 2, clients))
        tracemalloc.start()
        cohort = sample_cohort(config, groups, True, Stream(0))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(cohort) == 1000 and max(cohort) > clients / 2
    assert peaks[1] < 2 * peaks[0] < 2**20


def test_too_few_clients_in_a_range_are_an_error_with_a_remedy() -> None:
    config = ServerConfig(cohort=100, replacement=False)
    with pytest.raises(ConfigError, match=r"90 labeled clients and there are 5: lower"):
        sample_cohort(config, Roster(range(5), range(5, 55)), True, Stream(0))
    with pytest.raises(TrainingError, match="no training client has a label"):
        sample_cohort(config, Roster(range(0), range(5)), True, Stream(0))


def test_while_clients_are_away_a_cohort_is_of_those_who_are_there() -> None:
    config = ServerConfig(cohort=10, alpha=0.6, replacement=False)
    few = Roster(range(4), range(4, 50), away=7)
    assert cohort_draws(config, few, True) == (Draw(4, 4), Draw(4, 46))
    assert sorted(sample_cohort(config, few, True, Stream(0)))[:4] == [0, 1, 2, 3]
    assert len(sample_cohort(config, few, True, Stream(0))) == 8
    with pytest.raises(ConfigError, match="6 labeled clients and there are 4"):
        sample_cohort(config, few._replace(away=0), True, Stream(0))


def test_no_labeled_client_at_all_is_an_error() -> None:
    with pytest.raises(TrainingError, match="no training client has a label"):
        sample_cohort(ServerConfig(), roster(0, 5), True, Stream(0))


def test_every_round_has_its_own_cohort_and_every_client_its_turn() -> None:
    rounds = [
        sample_cohort(ServerConfig(cohort=10, alpha=0.5), roster(50, 50), True, Stream(0).child(r))
        for r in range(200)
    ]
    assert len({tuple(c) for c in rounds}) == 200
    assert {i for cohort in rounds for i in cohort} == set(range(100))


def test_every_round_of_a_training_draws_a_cohort_of_its_own() -> None:
    """An engine that only writes down whom it is asked for."""

    class Listening:
        roster, cohorts = Roster(np.arange(6), np.arange(6, 8)), list[list[int]]()

        def train(self, task: Task) -> Iterator[Reply]:
            self.cohorts.append(list(task.cohort.values()))
            yield Reply(task.round, {n: 0 * p for n, p in task.psi.items()}, torch.ones(()), 1, 1)

        def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
            raise NotImplementedError

    m, config, runner = method("fedavg", model="mlp"), ServerConfig(20, 4), Listening()
    start = initial_state(config, m, STREAM, torch.device("cpu"), torch.float32)
    list(train(config, m, runner, start, STREAM))
    assert len({tuple(cohort) for cohort in runner.cohorts}) > 15
    assert {i for cohort in runner.cohorts for i in cohort} == set(range(6))
    whole, runner.cohorts = runner.cohorts, []
    list(train(config, m, runner, replace(start, round=12), STREAM))
    assert runner.cohorts == whole[12:]  # a continued run draws those of its rounds


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"cohort": 0}, {"alpha": 1.5}])
def test_senseless_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**settings)  # type: ignore[arg-type]


def test_the_learning_rate_falls_over_the_last_share_of_the_rounds() -> None:
    constant, falling = ServerConfig(10), ServerConfig(10, lr_decay_fraction=0.4)
    assert [constant.rate(r) for r in range(1, 11)] == [1.0] * 10
    assert [falling.rate(r) for r in (1, 6, 7)] == [1.0] * 3
    assert [falling.rate(r) for r in (8, 9, 10)] == pytest.approx([0.75, 0.5, 0.25])
    rising = replace(falling, warm_up=3)
    assert [rising.rate(r) for r in (1, 2, 3, 4, 7)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rising.rate(10) == pytest.approx(0.25)


@pytest.mark.parametrize(("round", "rate"), [(2, 1.0), (3, 1.0), (4, 0.5)])
def test_a_round_steps_at_the_rate_of_its_number(round: int, rate: float) -> None:
    """From one state, with a falling rate and with a constant one."""
    m = method("fedavg", torch.float64, "mlp")
    moves = []
    for fraction in (0.5, 0.0):
        config = ServerConfig(
            4, 3, lr_decay_fraction=fraction, optimizer=OptimizerConfig("sgd", 0.5)
        )
        start = initial_state(config, m, STREAM, torch.device("cpu"), torch.float64)
        runner = engine("batched", m, "float64", ClientConfig(batch_size=10))
        done = next(train(config, m, runner, replace(start, round=round - 1), STREAM))
        moves.append({n: p - start.psi[n] for n, p in done.state.psi.items()})
    falling, constant = moves
    assert max(float(move.abs().max()) for move in constant.values()) > 1e-3
    for name, move in constant.items():
        assert torch.allclose(falling[name], rate * move, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", [OptimizerConfig("sgd", 0.5), OptimizerConfig("adam", 0.01)])
@pytest.mark.parametrize("name", ["flowdup", "flowdup-corrected", "flowdup-plus", "pefll"])
def test_h1_steps_at_its_own_rate_and_all_else_at_the_servers(
    name: str, optimizer: OptimizerConfig
) -> None:
    moves = []
    for scale in (1.0, 0.25):
        settings = merge(METHOD_SETTINGS[name], {"hypernetwork": {"h1_lr_scale": scale}})
        context = MethodContext("cnn-small", SPEC, STREAM, "cpu", torch.float64)
        m = MethodConfig.from_table(settings).build(context)
        config = ServerConfig(1, 3, optimizer=optimizer)
        start = initial_state(config, m, STREAM, torch.device("cpu"), torch.float64)
        runner = engine("batched", m, "float64", ClientConfig(batch_size=10))
        done = next(train(config, m, runner, start, STREAM))
        moves.append({n: p - start.psi[n] for n, p in done.state.psi.items()})
    for parameter, move in moves[0].items():
        assert move.abs().max() > 0, parameter
        wanted = (0.25 if parameter.startswith("h1.") else 1.0) * move
        assert torch.allclose(moves[1][parameter], wanted, rtol=1e-6, atol=1e-14), parameter


class Told(FedAvg):
    broadcast = ("table", "rate")

    def server_state(self) -> Params:
        return {"table": torch.zeros(3), "rate": torch.ones(())}


def test_what_is_broadcast_may_have_any_shape_but_no_name_of_something_else(
    tmp_path: Path,
) -> None:
    register_method("told", Told)
    try:
        config = read_config(
            {"model": "mlp", "method": {"name": "told"}, "server": {"rounds": 1, "cohort": 2}}
        )
        (metrics,) = train_run(config, tmp_path, population=population())
        assert metrics["rate"] == 1.0 and "table" not in metrics
        for taken in ("loss", "1.weight"):
            odd = method("fedavg", model="mlp")
            odd.broadcast = (taken,)
            with pytest.raises(ConfigError, match=f"broadcasts '{taken}'"):
                initial_state(ServerConfig(), odd, Stream(0), torch.device("cpu"), torch.float32)
    finally:
        METHODS.unregister("told")


def averages(share: float, rounds: int) -> tuple[list[Params], list[Params]]:
    """psi and its average after every round."""
    fedavg = method("fedavg", torch.float64)
    config = ServerConfig(rounds=rounds, cohort=3, averaging=share)
    start = initial_state(config, fedavg, STREAM, torch.device("cpu"), torch.float64)
    ours = engine("batched", fedavg, "float64", ClientConfig(batch_size=10))
    states = [r.state for r in train(config, fedavg, ours, start, STREAM)]
    assert all(s.deployed is not s.psi for s in states)
    return [start.psi, *(s.psi for s in states)], [start.average, *(s.average for s in states)]


def test_the_average_of_psi_is_the_plain_recursion() -> None:
    """It follows psi at first: round / (round + 10) of it stays, at most the share asked for."""
    psi, average = averages(0.2, 4)
    wanted = psi[0]
    for number, (new, found) in enumerate(zip(psi[1:], average[1:], strict=True), 1):
        stays = min(0.2, number / (number + 10))
        wanted = {n: stays * w + (1 - stays) * new[n] for n, w in wanted.items()}
        for name, mean in found.items():
            torch.testing.assert_close(mean, wanted[name], rtol=1e-12, atol=1e-14)
    assert any(not torch.equal(average[-1][n], p) for n, p in psi[-1].items())


def test_a_stage_counts_its_rounds_and_its_rate_from_its_own_beginning() -> None:
    """Cohorts are those of the run's rounds, steps those of the stage's."""
    fedavg = method("fedavg", torch.float64)
    config = ServerConfig(
        rounds=2, cohort=3, lr_decay_fraction=1.0, optimizer=OptimizerConfig("sgd", 1.0)
    )
    ours = engine("batched", fedavg, "float64", ClientConfig(batch_size=10))
    start = initial_state(config, fedavg, STREAM, torch.device("cpu"), torch.float64)
    late = replace(start, round=7, began=7, stage=1)
    numbers, states = zip(
        *((r.state.round, r.state) for r in train(config, fedavg, ours, late, STREAM)), strict=True
    )
    assert numbers == (8, 9)
    constant = replace(config, lr_decay_fraction=0.0)
    full = next(train(constant, fedavg, ours, late, STREAM)).state
    assert all(torch.equal(full.psi[n], p) for n, p in states[0].psi.items())  # the rate is 1
