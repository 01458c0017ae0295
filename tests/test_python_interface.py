"""What callers hand over in Python: it works, or it is one sentence."""

import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import METHODS, SPEC, client, population

import flowdup
from flowdup import ClientData, Federation, InputSpec, Population
from flowdup.data import LazyClients
from flowdup.errors import DataError, FlowdupError, TrainingError

FLOATS = InputSpec((6,), "float32", 4)
X = np.arange(12, dtype=np.float64).reshape(2, 6)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("interface")
    config = flowdup.read_config(
        {"model": "mlp", "method": METHODS["flowdup"], "server": {"rounds": 1, "cohort": 2}}
    )
    list(flowdup.train_run(config, path, population=population()))
    return path


@pytest.mark.parametrize(
    "x",
    [
        X.astype(np.longdouble),
        X.astype(np.float16),
        X.astype(np.uint64),
        X.astype(np.ulonglong),
        X.astype(">f8"),
        X[:, ::-1],
        X.tolist(),
        torch.from_numpy(X).requires_grad_(),
        torch.from_numpy(X).to_sparse().to_dense(),
        X.astype(bool),
    ],
    ids=lambda x: str(getattr(x, "dtype", type(x).__name__)),
)
def test_numbers_of_any_kind_are_inputs(x: Any) -> None:
    found = FLOATS.check(ClientData(x)).x
    assert found.dtype == torch.float32 and found.shape == (2, 6) and not found.requires_grad


@pytest.mark.parametrize(
    "x",
    [
        [[1.0] * 6, [1.0] * 5],
        [[1.0] * 6, None],
        "abc",
        None,
        X.astype(complex),
        X.astype(object),
        X.astype("datetime64[s]"),
        torch.from_numpy(X).to_sparse(),
        torch.zeros(2, 6, device="meta"),
        torch.zeros(2, 6, dtype=torch.complex64),
        [[10**400] * 6] * 2,
        np.full((2, 6), np.finfo(np.longdouble).max),
    ],
    ids=lambda x: str(getattr(x, "dtype", type(x).__name__)),
)
def test_what_is_no_array_of_numbers_is_one_sentence(x: Any, run: Path) -> None:
    with pytest.raises(DataError, match=r": (give|clean|convert)"):
        FLOATS.check(ClientData(x))
    with pytest.raises(DataError):
        flowdup.load(run).personalize(x)


def test_labels_of_any_kind_of_whole_number_are_read() -> None:
    kinds: list[Any] = [[0, 3], np.array([0, 3], np.uint64), torch.tensor([0, 3]), [-1, 3]]
    for y in (*kinds, kinds[2].to(torch.uint64), np.array([0, 3], np.ulonglong)):
        found = FLOATS.check(ClientData(torch.from_numpy(X), y)).y
        assert found is not None and found.dtype == torch.int64 and int(found[1]) == 3


@pytest.mark.parametrize(
    "y",
    [
        np.array([0, 2**64 - 1], np.uint64),
        torch.from_numpy(np.array([0, 2**63], np.uint64)),
        [0, 10**30],
        [0, 4],
        [0, -2],
        [0],
        [[0], [0, 1]],
        ["a", "b"],
        torch.tensor([0, 1]).to_sparse(),
        [0.0, 1.0],
        0,
    ],
    ids=str,
)
def test_labels_that_no_class_has_are_one_sentence(y: Any) -> None:
    with pytest.raises(DataError, match="labels"):
        FLOATS.check(ClientData(torch.from_numpy(X), y))


@pytest.mark.parametrize(
    "change",
    [
        {"std": (0.0,)},
        {"std": (-1.0,)},
        {"std": (math.nan,)},
        {"std": (1e-320,)},
        {"mean": (math.inf,)},
        {"mean": (0.0, 0.0)},
        {"mean": ()},
        {"mean": ("a",)},
        {"shape": ()},
        {"shape": (0, 8, 8)},
        {"shape": (1.0, 8, 8)},
        {"shape": (2**40, 2**40)},
        {"shape": 3},
        {"shape": [1, 8, 8]},
        {"mean": 0.5},
        {"std": None},
        {"dtype": "float64"},
        {"dtype": None},
        {"classes": 0},
        {"classes": 2.0},
        {"classes": True},
    ],
    ids=str,
)
def test_inputs_that_cannot_be_read_are_refused_where_they_are_described(change: Any) -> None:
    with pytest.raises(DataError):
        replace(SPEC, **change)


def test_numpys_scalars_serve_as_traits_and_as_mean(tmp_path: Path) -> None:
    traits: Any = {"site": np.str_("a"), "age": np.int64(3), "dose": np.float32(0.5), "new": True}
    checked = FLOATS.check(ClientData(torch.from_numpy(X), name="a", traits=traits))
    assert checked.traits == {"site": "a", "age": 3, "dose": 0.5, "new": True}
    assert {type(v) for v in checked.traits.values()} == {str, int, float, bool}
    assert type(replace(SPEC, mean=(np.float32(0.5),)).mean[0]) is float  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1e20, -1e300, np.float64(1e200), 2**63 - 1, 1 - 2**63])
def test_any_finite_float_and_any_integer_of_64_bits_is_a_trait(value: Any) -> None:
    traits = {"dose": value}
    checked = FLOATS.check(ClientData(torch.from_numpy(X), name="a", traits=traits))
    assert checked.traits == traits


@pytest.mark.parametrize(
    "traits",
    [
        {"a": None},
        {"a": {"b": 1}},
        {"a": [1]},
        {"a": math.nan},
        {"a": "x" * 10**6},
        {"a": 10**400},
        {"a": np.zeros(2)},
        {"a": 1j},
        {3: "a"},
        {("a",): 1},
        {None: 1},
        {"x" * 10**6: 1},
        ["a"],
        None,
    ],
    ids=lambda traits: str(traits)[:20],
)
def test_odd_traits_are_one_short_sentence(traits: Any) -> None:
    with pytest.raises(DataError, match="trait") as found:
        FLOATS.check(ClientData(torch.from_numpy(X), name="a", traits=traits))
    assert len(str(found.value)) < 400


@pytest.mark.parametrize("name", [3, None, "x" * 10**6, ["a"]], ids=lambda name: str(name)[:9])
def test_odd_names_are_one_short_sentence(name: Any) -> None:
    with pytest.raises(DataError, match="named") as found:
        FLOATS.check(ClientData(torch.from_numpy(X), name=name))
    assert len(str(found.value)) < 400


def test_half_a_letter_and_html_in_names_reach_the_report(tmp_path: Path) -> None:
    odd = "<script>alert(1)</script>\ud800"
    groups = [[replace(client(i, 9), name=f"{odd}{i}", traits={odd: i % 2}) for i in (0, 4, 8)]] * 3
    config = flowdup.read_config({"model": "mlp", "method": METHODS["fedavg"]} | SHORT)
    list(flowdup.train_run(config, tmp_path, population=Population(SPEC, *groups)))
    flowdup.evaluate_run(tmp_path, Population(SPEC, *groups))
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "&lt;script" in page


SHORT = {"server": {"rounds": 1, "cohort": 2}}


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_without_training_clients_nothing_trains_and_others_are_evaluated(
    engine: str, tmp_path: Path
) -> None:
    table = {"model": "mlp", "method": METHODS["flowdup"], "engine": {"name": engine}} | SHORT
    config, whole = flowdup.read_config(table), population()
    nobody: list[Any] = [[], LazyClients(0, lambda number: client(number, 5), 0, 5)]
    for train in nobody:
        with pytest.raises(TrainingError, match="no training client"):
            list(flowdup.train_run(config, tmp_path / "a", population=replace(whole, train=train)))
    list(flowdup.train_run(config, tmp_path / "b", population=whole))
    result = flowdup.evaluate_run(tmp_path / "b", replace(whole, train=[]))
    assert len(result["clients"]) == 8


def test_a_federation_works_in_a_spawned_worker(run: Path) -> None:
    federation, x = flowdup.load(run), client(0, 20).x
    here = federation.personalize(x)(x)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool:
        there = pool.submit(_logits, federation, x).result(60)
    assert (there == here).all()


def _logits(federation: Federation, x: torch.Tensor) -> torch.Tensor:
    torch.set_num_threads(1)
    with torch.no_grad():
        return federation.personalize(x)(x).clone()


HUGE: list[Callable[[], Any]] = [
    lambda: {"method": METHODS["flowdup"] | {"hypernetwork": {"hidden": 10**12}}},
    lambda: {
        "model": "mlp",
        "method": METHODS["flowdup"] | {"hypernetwork": {"embedding": 10**12}},
    },
    lambda: {"method": METHODS["flowdup"] | {"hypernetwork": {"layers": 10**9}}},
    lambda: {"method": {"name": "pefll", "hypernetwork": {"hidden": 10**10}}},
]


@pytest.mark.parametrize("table", HUGE)
def test_settings_that_no_memory_holds_are_one_sentence(table: Callable[[], Any]) -> None:
    with pytest.raises(FlowdupError, match=r"memory|between"):
        flowdup.run.Simulation(flowdup.read_config({"model": "mlp"} | table()), population())


def test_a_model_of_more_classes_than_memory_holds_is_one_sentence() -> None:
    crowd = Population(replace(SPEC, classes=2**31 - 1), [client(0, 5)], [], [])
    config = flowdup.read_config({"model": "mlp", "method": METHODS["fedavg"]})
    with pytest.raises(FlowdupError, match="memory"):
        flowdup.run.Simulation(config, crowd)
