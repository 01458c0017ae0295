"""User-level differential privacy: noise is there, and epsilon is no smaller than the truth."""

import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from flowdup.aggregation import AggregationConfig, robust
from flowdup.checkpoint import save_checkpoint
from flowdup.config import Config, Stage, read_config
from flowdup.engines import Engine, Roster, SupportQuery
from flowdup.errors import CheckpointError, ConfigError
from flowdup.messages import Reply, Task
from flowdup.methods import MethodConfig
from flowdup.params import Params, pack
from flowdup.privacy import (
    Draw,
    PrivacyConfig,
    PrivateRounds,
    epsilon,
    gaussian_noise,
    noise_for,
    normal,
)
from flowdup.random import Stream
from flowdup.run import train_run
from flowdup.run.simulation import Simulation
from flowdup.server import next_round

ZEROS = {"w": torch.zeros(300, 201), "b": torch.zeros(())}


def noise(config: PrivacyConfig, round: int = 1, clients: int = 10) -> torch.Tensor:
    return pack(gaussian_noise(config, 0.5, Stream(3), round)(ZEROS, clients))


def test_noise_is_normal_with_the_stated_deviation() -> None:
    drawn = noise(PrivacyConfig(2.0)).double()
    assert drawn.std().item() == pytest.approx(2.0 * 0.5 / 10, rel=0.02)
    assert abs(drawn.mean().item()) < 4 * 0.1 / math.sqrt(drawn.numel())
    scaled = (drawn / 0.1).sort().values
    ranks = (torch.arange(scaled.numel()) + 0.5) / scaled.numel()
    normal_shares = 0.5 * (1 + torch.erf(scaled / math.sqrt(2)))
    assert (normal_shares - ranks).abs().max() < 1.63 / math.sqrt(scaled.numel())  # Kolmogorov


def test_extreme_words_give_finite_numbers() -> None:
    words = np.array([0, 0, 0, 0, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1], np.uint32)
    assert np.isfinite(normal(words)).all() and normal(words)[0] > 8


def test_noise_follows_from_seed_and_round_or_from_a_secret(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 32)
    ways = [PrivacyConfig(1.0), *(PrivacyConfig(1.0, secret=str(f)) for f in files)]
    drawn = [noise(way, round) for way in ways for round in (1, 2)]
    assert all(torch.equal(noise(way, 2), drawn[2 * i + 1]) for i, way in enumerate(ways))
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.02


@pytest.mark.parametrize("secret", [False, True])
def test_another_mean_has_other_noise_and_the_same_mean_the_same(
    tmp_path: Path, secret: bool
) -> None:
    """Or the difference of two psi of one round, with and without a client, would tell it all."""
    (tmp_path / "key").write_bytes(b"k" * 32)
    config = PrivacyConfig(1.0, secret=str(tmp_path / "key") if secret else "")
    moved = {"w": ZEROS["w"] + 1e-3, "b": ZEROS["b"]}

    def drawn(config: PrivacyConfig, mean: Params, clients: int = 10) -> Tensor:
        noised = gaussian_noise(config, 0.5, Stream(3), 1)(mean, clients)
        return (pack(noised) - pack(mean)).double()

    first = drawn(config, ZEROS)
    assert torch.equal(first, drawn(config, ZEROS))
    others = [
        drawn(config, moved),
        drawn(config, ZEROS, 20),
        drawn(replace(config, noise=2.0), ZEROS),  # two scales of one noise would give the mean
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.02


def test_a_secret_draws_other_cohorts(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32)
    drawn = []
    for secret in ("", str(tmp_path / "key")):
        made = Simulation(private(secret=secret))
        state, config = made.initial_state(), made.config.server
        latest = next_round(config, made.method, made.engine, state, made.stream)
        drawn.append(sorted(latest.cohort.values()))
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_secret_that_is_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match="32"):
        noise(PrivacyConfig(1.0, secret=str(tmp_path / "key")))


def update(value: float) -> Reply:
    return Reply(
        1, {n: torch.full_like(p, value) for n, p in ZEROS.items()}, torch.tensor(1.0), 1, 1
    )


def unchanged(delta: Params, clients: int) -> Params:
    return delta


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))
@settings(max_examples=25, deadline=None)
def test_a_replaced_client_moves_the_sum_by_two_bounds_at_most(old: float, new: float) -> None:
    aggregate = robust(AggregationConfig(norm_bound=0.5), 1, 3, unchanged)
    a, b = (
        pack(aggregate(ZEROS, [update(0.001), update(v), update(2.0)]).delta) for v in (old, new)
    )
    assert float((a - b).double().norm()) <= 2 * 0.5 / 3 * (1 + 1e-4)


def test_a_refused_client_counts_as_zero_and_not_as_absent() -> None:
    aggregate = robust(AggregationConfig(norm_bound=1e9), 1, 4, unchanged)
    found = aggregate(ZEROS, [update(1.0), update(math.nan), update(3.0)])
    assert torch.allclose(found.delta["w"], torch.tensor(4.0 / 4))


def spent(noise: float, draw: Draw, rounds: int, delta: float = 1e-5) -> float:
    return epsilon([PrivateRounds(noise, (draw,), rounds)], delta)


@pytest.mark.parametrize(("deviation", "rounds"), [(4.0, 1), (20.0, 10), (50.0, 1000)])
def test_without_sampling_it_is_the_gaussian_mechanism_with_twice_the_bound(
    deviation: float, rounds: int
) -> None:
    """T rounds are one of deviation z / sqrt(T), whose delta has a closed form."""
    found = spent(deviation, Draw(50, 50), rounds)
    exact = gaussian_delta(found, deviation / 2 / math.sqrt(rounds))
    assert exact <= 1e-5
    assert gaussian_delta(found / 1.3, deviation / 2 / math.sqrt(rounds)) > 1e-5  # and near it


def gaussian_delta(epsilon: float, deviation: float) -> float:
    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    half, shift = 0.5 / deviation, epsilon * deviation
    return below(half - shift) - math.exp(epsilon) * below(-half - shift)


def hockey_stick(epsilon: float, noise: float, share: float) -> float:
    """The delta of one round in the worst case that we know: the client sends C or -C, all others
    nothing; the integral of max(0, p - e^epsilon q).
    """
    x: NDArray[np.float64] = np.linspace(-60 * noise, 60 * noise, 2_000_001)

    def density(middle: float) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.exp(-((x - middle) ** 2) / (2 * noise**2))
        return found / (noise * math.sqrt(2 * math.pi))

    p, q = ((1 - share) * density(0) + share * density(end) for end in (1, -1))
    excess = np.maximum(0, p - math.exp(epsilon) * q)
    return float(excess.sum() * (x[1] - x[0]))


@pytest.mark.parametrize("noise", [0.8, 1.5, 3.0])
@pytest.mark.parametrize("draw", [Draw(1, 100), Draw(10, 100), Draw(90, 100)])
def test_epsilon_is_no_smaller_than_an_attack_that_is_computed_exactly(
    noise: float, draw: Draw
) -> None:
    assert hockey_stick(spent(noise, draw, 1), noise, draw.drawn / draw.of) <= 1e-5


def test_that_check_would_see_noise_counted_twice() -> None:
    assert hockey_stick(spent(2 * 1.5, Draw(90, 100), 1), 1.5, 0.9) > 1e-5


def test_more_rounds_cost_more_and_more_noise_or_a_smaller_share_less() -> None:
    base = spent(2.0, Draw(20, 1000), 100)
    assert spent(2.0, Draw(20, 1000), 101) > base
    assert spent(2.1, Draw(20, 1000), 100) < base
    assert spent(2.0, Draw(10, 1000), 100) < base
    assert spent(2.0, Draw(20, 1000), 0) == 0


def test_the_part_that_is_drawn_more_often_counts_and_stages_add_up() -> None:
    often, seldom, never = Draw(20, 100), Draw(5, 100), Draw(0, 100)
    both = epsilon([PrivateRounds(3.0, (seldom, often), 10)], 1e-5)
    assert both == spent(3.0, often, 10)
    stages = [PrivateRounds(3.0, (often, never), 6), PrivateRounds(3.0, (often, never), 4)]
    assert epsilon(stages, 1e-5) == pytest.approx(both)


def test_noise_is_found_for_an_epsilon() -> None:
    draw = Draw(20, 1000)
    found = noise_for(3.0, [draw], 50, 1e-5)
    assert 2.9 < spent(found, draw, 50) <= 3.0
    with pytest.raises(ConfigError, match="no noise gives"):
        noise_for(1e-9, [draw], 50, 1e-5)


def private(**changes: Any) -> Config:
    privacy = {"noise": 2.0, "delta": 1e-3} | changes
    return read_config(
        {
            "model": "mlp",
            "method": {"name": "fedavg"},
            "data": {
                "source": "digits",
                "points": 10,
                "overlap": True,
                "train_clients": 40,
                "validation_clients": 5,
                "test_clients": 5,
            },
            "server": {
                "rounds": 4,
                "cohort": 5,
                "replacement": False,
                "aggregation": {"norm_bound": 0.3},
                "privacy": privacy,
            },
            "engine": {"name": "sequential", "device": "cpu"},
            "run": {"checkpoint_every": 1},
        }
    )


def test_every_round_tells_epsilon_and_the_run_folder_keeps_it(tmp_path: Path) -> None:
    told = [row["epsilon"] for row in train_run(private(), tmp_path / "run")]
    wanted = [spent(2.0, Draw(5, 40), n, 1e-3) for n in (1, 2, 3, 4)]
    assert told == pytest.approx(wanted, abs=1e-4)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epsilon"] for line in lines] == told


class Shrinking:
    """An engine that reaches fewer clients from its third round on."""

    def __init__(self, engine: Engine, roster: Roster) -> None:
        self.engine, self.rosters = engine, [engine.roster, engine.roster, roster, roster]
        self.round = 0

    @property
    def roster(self) -> Roster:
        return self.rosters[self.round]

    def train(self, task: Task) -> Iterator[Reply]:
        self.round += 1
        return self.engine.train(task)

    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
        return self.engine.logits(params, pairs)


def test_a_round_of_fewer_clients_costs_what_it_costs_and_no_less() -> None:
    made = Simulation(private())
    few = Roster(made.engine.roster.labeled_ids[:8], made.engine.roster.unlabeled_ids)
    made.engine = Shrinking(made.engine, few)
    told = [metrics["epsilon"] for _, metrics in made.rounds(made.initial_state())]
    halves = [PrivateRounds(2.0, (Draw(5, n), Draw(0, 0)), 2) for n in (40, 8)]
    assert told[1] == pytest.approx(epsilon(halves[:1], 1e-3), abs=1e-4)
    assert told[3] == pytest.approx(epsilon(halves, 1e-3), abs=1e-4)
    assert told[3] > 1.5 * spent(2.0, Draw(5, 40), 4, 1e-3)  # as if nobody had left


def test_epsilon_goes_on_from_the_draws_in_the_checkpoint(tmp_path: Path) -> None:
    made = Simulation(private())
    *_, (state, metrics) = made.rounds(made.initial_state())
    save_checkpoint(tmp_path, made.federation, state)
    assert made.load_state(tmp_path).released == state.released
    assert made.epsilon(state) == pytest.approx(metrics["epsilon"], abs=1e-4)
    save_checkpoint(tmp_path, made.federation, replace(state, released=()))
    with pytest.raises(CheckpointError, match="no epsilon could be told"):
        made.load_state(tmp_path)


def test_a_run_with_a_secret_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32)
    config = private(secret=str(tmp_path / "key"))
    list(train_run(config, tmp_path / "whole"))
    halves = train_run(config, tmp_path / "halves")
    next(halves), next(halves)
    halves.close()
    list(train_run(config, tmp_path / "halves", resume=True))
    (a,), (b,) = ((tmp_path / f).glob("checkpoint/*.safetensors") for f in ("whole", "halves"))
    assert a.read_bytes() == b.read_bytes()
    stored = b"".join(
        p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "key"
    )
    assert b"k" * 32 not in stored


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ({"replacement": True}, "set server.replacement to false"),
        ({"aggregation": {"norm_bound": 0.0}}, r"set server\.aggregation\.norm_bound"),
        ({"aggregation": {"norm_bound": 1.0, "name": "median"}}, "to 'mean'"),
        ({"privacy": {"noise": 1.0, "delta": 0.0}}, "between 0 and 1"),
        ({"privacy": {"noise": -1.0}}, "server.privacy.noise"),
    ],
)
def test_what_no_epsilon_covers_is_refused(text: dict[str, Any], remedy: str) -> None:
    server = {"replacement": False, "aggregation": {"norm_bound": 1.0}, "privacy": {"noise": 1.0}}
    read_config({"server": server})
    with pytest.raises(ConfigError, match=remedy):
        read_config({"server": server | text})


def test_a_delta_that_allows_to_publish_a_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"below 0\.025"):
        Simulation(private(delta=0.1))


def test_a_stage_without_noise_would_undo_the_others() -> None:
    config = private()
    open_stage = replace(config.server, privacy=PrivacyConfig())
    before = (Stage(config.method, config.client, open_stage),)
    with pytest.raises(ConfigError, match="what one stage gives away"):
        Simulation(replace(config, before=before))


def test_a_method_that_follows_the_loss_is_refused() -> None:
    for adaptive in (True, False):
        config = private()
        table = {"name": "fedprox", "adaptive": adaptive}
        made = Simulation(replace(config, method=MethodConfig.from_table(table)))
        rounds = made.rounds(made.initial_state())
        if adaptive:
            with pytest.raises(ConfigError, match="follows the clients' loss"):
                next(rounds)
        else:
            next(rounds)


def test_without_the_accountant_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def missing(name: str, package: str | None = None) -> Any:
        return None if name == "dp_accounting" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    with pytest.raises(ConfigError, match=r"pip install 'flowdup\[privacy\]'"):
        Simulation(private())
