"""Bad actors: one client of six cannot ruin training that is clipped, trimmed or a median."""

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small import STREAM, engine, method, population
from torch import Tensor

from flowdup.aggregation import AggregationConfig, robust
from flowdup.client import ClientConfig
from flowdup.config import Config, read_config
from flowdup.engines import Engine, EngineConfig, SupportQuery, build_engine
from flowdup.engines.sequential import SequentialEngine
from flowdup.errors import ConfigError, FlowdupError, MessageError, TrainingError
from flowdup.evaluation import accuracy_summary, transductive_logits
from flowdup.messages import Reply, Task
from flowdup.params import Params
from flowdup.rank_one import Factors
from flowdup.run import train_run
from flowdup.run.simulation import Simulation
from flowdup.server import ServerConfig, initial_state, train

PSI = {"w": torch.zeros(3, 2), "b": torch.zeros(3)}
Attack = Callable[[Reply], Reply]


def reply(value: float, member: int = 0) -> Reply:
    delta = {n: torch.full_like(p, value) for n, p in PSI.items()}
    return Reply(1, delta, torch.tensor(value), 5, 10, member=member)


def values(config: AggregationConfig, replies: Sequence[Reply]) -> tuple[float, float]:
    """What every number of psi should move by, and the loss."""
    found = robust(config, 1, len(replies))(PSI, replies)
    numbers = {float(number) for d in found.delta.values() for number in d.flatten()}
    (number,) = numbers
    return number, float(found.loss)


@pytest.mark.parametrize(
    ("name", "trim", "wanted"),
    [
        ("mean", 0.2, 22.0),
        ("trimmed-mean", 0.2, 3.0),
        ("trimmed-mean", 0.01, 3.0),  # one at least
        ("trimmed-mean", 0.5, 3.0),
        ("median", 0.2, 3.0),
    ],
)
def test_extremes_are_left_out_by_coordinates(name: str, trim: float, wanted: float) -> None:
    config = AggregationConfig(name, trim, 1e9)
    replies = [reply(v) for v in (3.0, 100.0, 2.0, 1.0, 4.0)]
    assert values(config, replies) == pytest.approx((wanted, wanted))


def test_the_median_of_an_even_number_is_between_the_middle_two() -> None:
    replies = [reply(v) for v in (1.0, 2.0, 4.0, 99.0)]
    assert values(AggregationConfig("median"), replies) == (3.0, 3.0)
    assert values(AggregationConfig("median"), replies[:1]) == (1.0, 1.0)
    assert values(AggregationConfig("trimmed-mean"), replies[:2]) == (1.5, 1.5)


def test_blocks_of_coordinates_give_what_all_at_once_give() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 120_000, generator=draw)
    replies = [Reply(1, {"w": row}, torch.tensor(1.0), 1, 1) for row in rows]
    found = robust(AggregationConfig("median"), 1, 5)({"w": rows[0]}, replies)
    assert torch.equal(found.delta["w"], rows.median(0).values)


def test_a_long_update_is_scaled_to_the_bound_and_a_short_one_is_left_alone() -> None:
    found = robust(AggregationConfig(norm_bound=1.5), 1, 2)(PSI, [reply(0.5), reply(-80.0)])
    assert found.guard is not None and (found.guard.clipped, found.guard.refused) == (1, ())
    wanted = (0.5 - 1.5 / 3) / 2  # 9 numbers of 0.5 have the norm 1.5
    assert all(torch.allclose(d, torch.tensor(wanted)) for d in found.delta.values())
    assert found.guard.norm == pytest.approx((1.5 + 240) / 2)


def odd(**changes: Any) -> Reply:
    return replace(reply(1.0, member=3), **changes)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (odd(delta={n: torch.full_like(p, math.nan) for n, p in PSI.items()}), "NaN or infinite"),
        (odd(delta=PSI | {"b": torch.zeros(4)}), r"\(4,\)"),
        (odd(delta={"b": PSI["b"]}), "other tensors"),
        (odd(round=7), "round 7 came in round 1"),
        (odd(loss=torch.tensor(math.inf)), "NaN or infinite"),
        (odd(delta={n: torch.full_like(p, 1e30) for n, p in PSI.items()}), "norm 3e"),
        (
            odd(
                delta={"b": PSI["b"]},
                factors={"w": Factors(torch.full((1, 3), 1e30), torch.full((1, 2), 1e30))},
            ),
            "product is not finite",
        ),
    ],
)
def test_a_bad_reply_is_left_out_and_named(bad: Reply, why: str) -> None:
    config = AggregationConfig(norm_bound=100.0, beyond="refuse")
    found = robust(config, 1, 3)(PSI, [reply(1.0), bad, reply(3.0)])
    assert all(torch.equal(d, torch.full_like(d, 2.0)) for d in found.delta.values())
    assert (float(found.loss), found.padding) == (2.0, 0.5)
    assert found.guard is not None
    (refused,) = found.guard.refused
    assert refused.member == 3
    with pytest.raises(MessageError, match=why):
        raise MessageError(refused.reason)


def test_a_round_of_refusals_is_an_error() -> None:
    with pytest.raises(TrainingError, match="no reply that can be used"):
        robust(AggregationConfig(norm_bound=0.1, beyond="refuse"), 1, 1)(PSI, [reply(1.0)])


@pytest.mark.parametrize("name", ["mode", "Mean"])
def test_an_unknown_aggregation_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="use one of mean, trimmed-mean, median"):
        AggregationConfig(name)
    with pytest.raises(ConfigError, match="clip or refuse"):
        AggregationConfig(beyond=name)


def test_clients_run_one_by_one_where_each_is_looked_at() -> None:
    m, few = method("fedavg"), ClientConfig(batch_size=10)

    def build(name: str) -> Engine:
        return build_engine(EngineConfig(name, "cpu"), m, few, population().train, STREAM, True)

    with pytest.warns(RuntimeWarning, match="one after the other"):
        assert isinstance(build("auto"), SequentialEngine)
    assert isinstance(build("sequential"), SequentialEngine)
    with pytest.raises(ConfigError, match=r"engine\.name = 'auto'"):
        build("batched")


def test_processes_that_give_sums_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = EngineConfig("sequential", "cpu")
    with pytest.raises(ConfigError, match="start one process"):
        build_engine(settings, method("fedavg"), ClientConfig(), [], STREAM, True)


def test_without_a_bad_actor_a_wide_bound_changes_nothing_but_rounding() -> None:
    wide = trained(AggregationConfig(norm_bound=1e6))
    for name, p in trained(AggregationConfig()).items():
        assert torch.allclose(p, wide[name], atol=1e-6)


def trained(config: AggregationConfig) -> Params:
    server = ServerConfig(2, 5, aggregation=config)
    m = method("flowdup")
    state = initial_state(server, m, STREAM, torch.device("cpu"), torch.float32)
    runner = engine("sequential", m, "float32", ClientConfig(batch_size=10))
    *_, last = train(server, m, runner, state, STREAM)
    return last.state.psi


def everywhere(value: float) -> Attack:
    def attack(reply: Reply) -> Reply:
        whole = {n: torch.full_like(d, value) for n, d in reply.whole_delta().items()}
        return replace(reply, delta=whole, factors={})

    return attack


def flipped(reply: Reply) -> Reply:
    return replace(reply, delta={n: -100 * d for n, d in reply.whole_delta().items()}, factors={})


def misshapen(reply: Reply) -> Reply:
    return replace(reply, delta={n: torch.zeros(7) for n in reply.whole_delta()}, factors={})


ATTACKS: dict[str, Attack] = {
    "none": lambda reply: reply,
    "huge": everywhere(1e30),
    "nan": everywhere(math.nan),
    "misshapen": misshapen,
    "flipped": flipped,
}
DEFENCES: dict[str, dict[str, Any]] = {
    "mean": {},
    "clipped": {"norm_bound": 0.2},
    "trimmed": {"name": "trimmed-mean"},  # as the page has it
    "median": {"name": "median"},
}


class Attacked:
    """An engine one of whose clients is not what it seems."""

    def __init__(self, engine: Engine, attack: Attack) -> None:
        self.engine, self.attack, self.roster = engine, attack, engine.roster

    def train(self, task: Task) -> Iterator[Reply]:
        for reply in self.engine.train(task):
            yield self.attack(reply) if task.cohort[reply.member] == 2 else reply

    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
        return self.engine.logits(params, pairs)


def six_clients(aggregation: dict[str, Any]) -> Config:
    """What docs/howto/privacy.md says to train with, but for the aggregation."""
    table = documented("six-nodes.toml")
    table["server"]["aggregation"] = aggregation
    return read_config(table | {"engine": {"name": "sequential", "device": "cpu"}})


def documented(title: str) -> dict[str, Any]:
    page = (Path(__file__).parents[1] / "docs/howto/privacy.md").read_text()
    found: dict[str, Any] = tomllib.loads(page.split(f'toml title="{title}"\n')[1].split("```")[0])
    return found


@cache
def accuracy(defence: str, attack: str) -> float:
    """Of test clients after training, in percent; 0 where training ends with an error."""
    simulation = Simulation(six_clients(DEFENCES[defence]))
    simulation.engine = Attacked(simulation.engine, ATTACKS[attack])
    state = simulation.initial_state()
    try:
        for latest, metrics in simulation.rounds(state):
            state = latest
            if attack in ("nan", "misshapen"):
                assert metrics["refused"] == 1 and [*metrics["refused_clients"]] == ["2"]
    except FlowdupError:
        return 0.0
    with simulation.cores():
        logits = transductive_logits(simulation.engine, state.deployed, simulation.population.test)
    found = accuracy_summary(logits, simulation.population.test).mean
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("defence", "attack"),
    [
        *(("clipped", attack) for attack in ATTACKS),
        *(("trimmed", attack) for attack in ATTACKS),
        ("median", "flipped"),
    ],
)
def test_one_bad_actor_of_six_moves_accuracy_by_less_than_a_point(
    defence: str, attack: str
) -> None:
    assert accuracy("mean", "none") > 88
    assert abs(accuracy(defence, attack) - accuracy("mean", "none")) < 1


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "none"])
def test_one_bad_actor_of_six_ruins_the_plain_mean(attack: str) -> None:
    assert accuracy("mean", attack) < 20


def test_a_run_folder_records_what_was_clipped(tmp_path: Path) -> None:
    config = six_clients({"norm_bound": 0.2})
    config = replace(config, server=replace(config.server, rounds=2))
    rows = list(train_run(config, tmp_path / "run"))
    stored = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert [row["clipped"] for row in stored] == [row["clipped"] for row in rows] == [6, 6]
    assert all(row["refused"] == 0 and row["update_norm"] > 0.2 for row in rows)
