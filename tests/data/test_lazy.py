"""Clients that are made when they are asked for."""

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from small import SPEC, client

from flowdup.config import Config, read_config
from flowdup.data import ClientData, DataConfig, LazyClients, Population, load_population
from flowdup.data.lazy import lazy_clients
from flowdup.data.partition import Recipe
from flowdup.errors import ConfigError, DataError
from flowdup.random import Stream
from flowdup.run import embed_run, evaluate_run, train_run

Y = torch.arange(1000) % 10
X = torch.arange(1000).to(torch.int32).reshape(-1, 1, 1, 1).expand(-1, 1, 3, 3).clone()
X[:, 0, 0, 1] = -1  # a mark that shows the rotation
POOL = torch.arange(200, 1000)
MILLION = DataConfig(
    points=20,
    overlap=True,
    lazy=True,
    train_clients=1_000_000,
    validation_clients=4,
    test_clients=4,
)


def make(recipe: Recipe, clients: int = 10**6, labeled: int = 10**6, seed: int = 0) -> LazyClients:
    return lazy_clients(recipe, X, Y, POOL, clients, labeled, Stream(seed).child("train"))


def numbers(client: ClientData) -> list[int]:
    """Which points of X a client holds."""
    found: list[int] = client.x[:, 0, 1, 1].tolist()
    return found


@given(st.integers(0, 10**6 - 1), st.integers(0, 9))
def test_a_client_hangs_on_its_seed_and_number_alone(number: int, seed: int) -> None:
    recipe = Recipe(10, 2, (0, 90), True)
    one, same = make(recipe, seed=seed)[number], make(recipe, 2 * 10**6, seed=seed)[number]
    assert numbers(one) == numbers(same) == list(one.images)
    assert (one.name, one.traits) == (same.name, same.traits)
    assert one.name == f"train-{number}"
    assert numbers(one) != numbers(make(recipe, seed=seed + 1)[number])
    assert numbers(one) != numbers(make(recipe)[number - 1])


def test_clients_are_the_same_for_ever() -> None:
    one = make(Recipe(6, 2, (0, 90, 180), True))[123_456]
    assert one.images == (805, 335, 825, 476, 836, 756)
    assert one.traits == {"rotation": 90, "classes": "5+6"}


@given(st.integers(0, 10**6 - 1), st.integers(0, 5), st.sampled_from([20, 60, 80]))
def test_no_point_twice_and_as_many_classes_as_told_in_equal_parts(
    number: int, classes: int, size: int
) -> None:
    one = make(Recipe(size * (classes or 1), classes, (), True))[number]
    assert one.y is not None and (one.y == Y[numbers(one)]).all()
    assert len(one) == len(set(numbers(one))) == size * (classes or 1)
    assert min(numbers(one)) >= 200  # only of the pool
    if classes:
        assert sorted(np.unique(one.y, return_counts=True)[1].tolist()) == [size] * classes
        assert one.traits == {"classes": "+".join(str(c) for c in np.unique(one.y))}


@given(st.integers(0, 10**6 - 1), st.integers(0, 5), st.sampled_from([0.1, 0.5, 3.0]))
def test_unequal_shares_leave_a_client_its_points_and_classes(
    number: int, classes: int, dirichlet: float
) -> None:
    recipe = Recipe(37, classes, (0, 90), True, dirichlet)
    one, same = make(recipe)[number], make(recipe, 2 * 10**6)[number]
    assert numbers(one) == numbers(same) and one.traits == same.traits
    assert one.y is not None and (one.y == Y[numbers(one)]).all()
    assert len(one) == len(set(numbers(one))) == 37 and min(numbers(one)) >= 200
    counts = one.y.bincount()
    assert one.traits["main_class"] == int(counts.argmax())
    assert not classes or len(set(one.y.tolist())) <= classes


def test_unequal_shares_have_the_concentration_that_is_told() -> None:
    """The largest of ten shares, by 2000 clients of their own draws in numpy: 0.66 and 0.41."""
    for dirichlet in (0.1, 0.5):
        made = make(Recipe(70, 0, (), True, dirichlet))[:500]
        largest = [int(c.y.bincount().max()) / 70 for c in made if c.y is not None]
        draws = np.random.default_rng(0).dirichlet([dirichlet] * 10, 2000)
        counts = np.array(
            [np.random.default_rng(i).multinomial(70, q) for i, q in enumerate(draws)]
        )
        assert np.mean(largest) == pytest.approx(counts.max(1).mean() / 70, abs=0.03)


def test_a_listing_names_unequal_shares_only_where_there_are_some() -> None:
    assert "dirichlet" not in make(Recipe(10, 2, (), True)).recipe
    assert make(Recipe(10, 2, (), True, 0.5)).recipe["dirichlet"] == 0.5


def test_every_class_image_and_rotation_has_its_turn() -> None:
    made = make(Recipe(10, 2, (0, 90, 180, 270), True))[:2000]
    points = np.bincount([n for c in made for n in numbers(c)], minlength=1000)[200:]
    assert points.min() > 5 and points.max() < 60  # 25 on average
    classes = np.bincount([n % 10 for n in np.repeat(np.arange(200, 1000), points)])
    assert (abs(classes - 2000) < 250).all()
    turns = np.bincount([int(c.traits["rotation"]) // 90 for c in made])
    assert (abs(turns - 500) < 80).all()
    assert len({c.traits["classes"] for c in made}) == 45


def test_all_of_a_clients_images_are_turned_the_same_way() -> None:
    where = {0: (0, 1), 90: (1, 0), 180: (2, 1), 270: (1, 2)}  # counter-clockwise
    for one in make(Recipe(10, 0, (0, 90, 180, 270), True))[:100]:
        row, column = where[int(one.traits["rotation"])]
        assert (one.x[:, 0, row, column] == -1).all()


def test_classes_are_those_of_the_images_in_a_pool_of_any_order() -> None:
    """A pool is a random part of the images."""
    pool = torch.from_numpy(Stream(3).permutation(1000))[:700]
    made = lazy_clients(Recipe(20, 2), X, Y, pool, 50, 50, Stream(0).child("train"))
    for one in made:
        assert one.y is not None and torch.equal(one.y, Y[numbers(one)])
        assert one.y.bincount().sort().values[-2:].tolist() == [10, 10]
        assert set(numbers(one)) <= set(pool.tolist())


def test_the_first_clients_have_the_labels() -> None:
    made = make(Recipe(10, overlap=True), 50, 20)
    assert [c.labeled for c in made] == [True] * 20 + [False] * 30
    assert all(c.y is None for c in made[20:])
    assert (made.labeled, made.unlabeled) == (range(20), range(20, 50))


def test_they_are_a_sequence() -> None:
    made = make(Recipe(10, overlap=True), 50)
    assert len(made) == len(list(made)) == 50
    assert numbers(made[-1]) == numbers(made[49]) == numbers(made[48:][1])
    with pytest.raises(IndexError):
        made[50]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(801, 0, (), True), "only 800 are at hand: lower data.points"),
        (Recipe(162, 2, (), True), "needs 81 points and only 80"),
        (Recipe(801, 2, (), True, 0.5), "only 800 are at hand"),
        (Recipe(25, 2, (), True), "divide"),
        (Recipe(110, 11, (), True), "at most 10"),
        (Recipe(10, 0, (45,), True), "multiples of 90"),
    ],
)
def test_what_cannot_be_made_is_refused_before_any_client_is(recipe: Recipe, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(recipe)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"overlap": False}, r"set data.overlap = true and data.train_clients"),
        ({"train_clients": 0}, r"set data.overlap = true and data.train_clients"),
        ({"source": "femnist", "overlap": False}, r"clients of its own.* set data.lazy = false"),
        ({"source": "folder", "overlap": False}, r"clients of its own.* set data.lazy = false"),
        ({"train_clients": 2**32 + 1}, r"data.train_clients' must be between 0 and"),
    ],
)
def test_what_lazy_clients_need_is_said(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_population(replace(MILLION, **change), Stream(0))


def test_groups_share_no_image_and_pools_do_not_hang_on_how_many_clients_there_are() -> None:
    found, fewer = (
        load_population(replace(MILLION, train_clients=n, labeled_fraction=0.25), Stream(0))
        for n in (10**6, 400)
    )
    assert isinstance(found.train, LazyClients) and len(found.train) == 10**6
    assert len(found.train.labeled) == 250_000 and len(fewer.train[:100]) == 100
    for a, b in zip(found.train[:400], fewer.train, strict=True):
        assert torch.equal(a.x, b.x)
    assert [c.labeled for c in fewer.train] == [True] * 100 + [False] * 300
    train, validation = (
        {i for c in group[:1000] for i in c.images} for group in (found.train, found.validation)
    )
    assert len(train) == 1040 and not train & validation
    assert [len(c) for c in found.validation] == [len(c) for c in found.test] == [20] * 4


def test_a_listing_says_how_many_there_are_and_how_they_are_made() -> None:
    config = replace(MILLION, classes_per_client=2, labeled_fraction=0.1)
    found = load_population(config, Stream(0))
    train = found.listing()["train"]
    assert (train["clients"], train["labeled"], train["points"]) == (1_000_000, 100_000, 20)
    assert train["recipe"]["classes_per_client"] == 2
    assert train["first"]["images"] == list(found.train[0].images)
    assert train != load_population(config, Stream(1)).listing()["train"]
    assert len(json.dumps(train)) < 1000


def test_a_million_clients_take_no_more_memory_than_a_thousand() -> None:
    """Objects and arrays are counted, tensors are not: `tools/` has whole processes."""
    load_population(MILLION, Stream(0))  # imports and caches
    peaks = []
    for clients in (10**3, 10**6):
        tracemalloc.start()
        found = load_population(replace(MILLION, train_clients=clients), Stream(0))
        found.checked().listing()
        cohort = [found.train[i] for i in range(0, clients, clients // 200)]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(cohort) == 200
    assert peaks[1] < peaks[0] + 2**19  # half a byte per client


def config(data: DataConfig, rounds: int, engine: str = "batched") -> Config:
    table = {
        "model": "mlp",
        "method": {"name": "flowdup", "subspace": {"k": 50}, "hypernetwork": {"hidden": 8}},
        "server": {"rounds": rounds, "cohort": 6, "alpha": 0.5, "replacement": False},
        "client": {"batch_size": 10},
        "engine": {"device": "cpu", "name": engine},
        "run": {"checkpoint_every": 1, "evaluate_every": 2},
    }
    return replace(read_config(table), data=data)


def psi(folder: Path) -> dict[str, bytes]:
    (path,) = (folder / "checkpoint").glob("*.safetensors")
    return {name: t.numpy().tobytes() for name, t in load_file(path).items()}


def test_a_run_of_a_million_clients_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = config(replace(MILLION, labeled_fraction=0.5, rotations=(0, 90)), 4)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert len(list(train_run(settings, whole))) == 4
    rounds = train_run(settings, broken)
    next(rounds)
    next(rounds)
    rounds.close()
    assert psi(broken) != psi(whole)
    assert [m["round"] for m in train_run(settings, broken, resume=True)][-1] == 4
    assert psi(broken) == psi(whole)
    assert evaluate_run(whole)["cost"]["points"] == 20
    other = replace(settings, data=replace(settings.data, train_clients=10))
    with pytest.raises(ConfigError, match=r"data.train_clients is 10 .* and 1000000 in"):
        next(train_run(other, whole, resume=True))


def test_engines_agree_on_lazy_clients_and_ask_for_each_member_once(tmp_path: Path) -> None:
    asked: list[int] = []

    def one(number: int) -> ClientData:
        asked.append(number)
        return client(number, 10)

    for engine in ("sequential", "batched"):
        asked.clear()
        lazy = LazyClients(10**6, one, 10**5, 10, {"what": "bright quadrants"})
        population = Population(SPEC, lazy, [], [client(-1, 10)])
        list(train_run(config(MILLION, 2, engine), tmp_path / engine, population=population))
        members = [i for i in asked if i]  # client 0 is listed
        assert len(members) == len(set(members)) == 12  # 2 cohorts of 6
        assert sum(i < 10**5 for i in members) == 6
    a, b = (
        load_file(next((tmp_path / name / "checkpoint").glob("*.safetensors")))
        for name in ("sequential", "batched")
    )
    assert max(float((a[n] - b[n]).abs().max()) for n in a if n.startswith("psi/")) < 1e-4


def test_a_lazy_client_that_does_not_fit_is_refused_when_it_is_made() -> None:
    wrong = LazyClients(9, lambda _: ClientData(torch.zeros(3, 2), name="eve"), 9, 3)
    found = Population(SPEC, wrong, [], []).checked()
    with pytest.raises(DataError, match="client 'eve' has inputs of shape"):
        found.train[4]


def test_a_million_clients_are_too_many_for_a_figure(tmp_path: Path) -> None:
    out = tmp_path / "run"
    list(train_run(config(replace(MILLION, rotations=(0, 90)), 1), out))
    with pytest.raises(DataError, match=r"1,000,000 clients .* fewer with data.train_clients"):
        embed_run(out, group="train")
    told = embed_run(out, group="train", settings=["data.train_clients=12"])
    assert all(os.path.exists(file) for file in told["files"])
