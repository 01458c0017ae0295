"""Every engine gives the same psi, for every method, for ragged clients."""

from typing import Any

import numpy as np
import pytest
import torch
from small import METHODS, SPEC, STREAM, broadcast, engine, first_task, method, ragged_clients
from torch.func import grad

from flowdup.aggregation import mean, total
from flowdup.batches import batch_plan
from flowdup.client import ClientConfig
from flowdup.data import ClientData
from flowdup.engines import EngineConfig, SupportQuery, build_engine
from flowdup.engines.batched import BatchedEngine
from flowdup.engines.sequential import SequentialEngine
from flowdup.errors import ConfigError
from flowdup.methods import Batch, MethodConfig, MethodContext, Params
from flowdup.optimizers import OptimizerConfig
from flowdup.rank_one import FactoredGradient
from flowdup.server import ServerConfig, initial_state, train

LOCAL = {
    "sgd": OptimizerConfig("sgd", 0.02),
    "momentum": OptimizerConfig("sgd", 0.01, momentum=0.9, weight_decay=1e-3),
    "adam": OptimizerConfig("adam", 1e-3, eps=1e-3),  # a small one enlarges rounding
}


def psi_after(kind: str, name: str, dtype: str, local: str, at_once: int = 0) -> Params:
    precision = getattr(torch, dtype)
    m = method(name, precision)
    config = ClientConfig(2, 10, 0.5, LOCAL[local])
    server = ServerConfig(4, 5, 0.6, True, 0.5, OptimizerConfig("sgd", 0.5, momentum=0.5))
    settings = EngineConfig(kind, "cpu", dtype, at_once)
    runner = build_engine(settings, m, config, ragged_clients(), STREAM)
    state = initial_state(server, m, STREAM, torch.device("cpu"), precision)
    for result in train(server, m, runner, state, STREAM):
        state = result.state
        assert torch.isfinite(result.loss)
    return state.psi


def distance(a: Params, b: Params) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in a)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("local", "dtype", "tolerance"),
    [("sgd", "float32", 1e-5), ("sgd", "float64", 1e-9), ("adam", "float64", 1e-9)],
)
def test_batched_gives_the_psi_of_sequential(
    name: str, local: str, dtype: str, tolerance: float
) -> None:
    a, b = (psi_after(kind, name, dtype, local) for kind in ("sequential", "batched"))
    start = {n: p.to(a[n].dtype) for n, p in method(name).init(STREAM.child("psi")).items()}
    assert distance(a, start) > 1e-3  # it moved
    assert distance(a, b) < tolerance


@pytest.mark.parametrize("name", ["flowdup", "fedavg", "fedtta", "pefll"])
def test_clients_in_1_2_or_8_threads_give_the_same_bits(name: str) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            found.append(psi_after("sequential", name, "float32", "sgd"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(other[n], p) for n, p in found[0].items())


@pytest.mark.parametrize("name", METHODS)
def test_padding_changes_nothing_against_batches_cut_by_hand(name: str) -> None:
    """Both engines get short batches padded to full rows; here the padding is cut away."""
    m = method(name, torch.float64)
    params = {n: p.double() for n, p in m.init(STREAM).items()}
    config = ClientConfig(1, 10, 0.5, LOCAL["sgd"])
    sent = params | broadcast(m, params)
    for data in ragged_clients():
        own = data.labels
        if m.relabels:
            own = m.labels(sent, data.x, own, torch.ones(len(data), dtype=torch.float64))
        plan = batch_plan(STREAM.child("order", 1), 0, len(data), 1, 10)
        now = params
        for row in plan:
            first, second = (half[half >= 0] for half in (row[:5], row[5:]))
            order = torch.from_numpy(np.concatenate([first, second]))
            y = own[order]
            ones = torch.ones(len(order), dtype=torch.float64)
            batch = Batch(data.x[order], y.clamp(min=0), ones, (y >= 0).double())
            gradient = grad(m.loss)(now, batch, sent)
            gradient = FactoredGradient(gradient, {}).clipped(0.5).dense
            now = {n: p - 0.02 * gradient[n] for n, p in now.items()}
        runner = engine("batched", m, "float64", config, [data])
        found = total(runner.train(first_task(m, params))).delta
        assert distance(found, {n: now[n] - params[n] for n in now}) < 1e-12


def test_a_cohort_in_pieces_gives_the_psi_of_the_whole() -> None:
    a, b = (psi_after("batched", "flowdup", "float64", "sgd", n) for n in (0, 2))
    assert distance(a, b) < 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_a_cohort_as_ragged_as_femnists_wastes_less_than_30_percent_on_padding(seed: int) -> None:
    """19 to 584 points, median about 180; padding all to the longest would waste half."""
    sizes = np.random.default_rng(seed).lognormal(5.2, 0.5, 100).clip(19, 584).astype(int)
    m = method("fedavg", model="mlp")
    config = ClientConfig(1, 20, 0.0, LOCAL["sgd"])
    clients = [ClientData(torch.zeros(n, 1, 8, 8, dtype=torch.uint8)) for n in sizes.tolist()]
    task = first_task(m, m.init(STREAM), 100)
    batched, alone = (
        mean(task.psi, engine(kind, m, "float32", config, clients).train(task))
        for kind in ("batched", "sequential")
    )
    assert 0 < alone.padding < batched.padding < 0.3


@pytest.mark.parametrize("name", METHODS)
def test_batched_gives_the_logits_of_sequential_for_ragged_clients(name: str) -> None:
    m = method(name, torch.float64)
    params = {n: p.double() for n, p in m.init(STREAM).items()}
    clients = ragged_clients()
    pairs = [SupportQuery(a.x, b.x) for a, b in zip(clients, reversed(clients), strict=True)]
    one, all_ = (
        engine(kind, m, "float64", ClientConfig(batch_size=10)).logits(params, pairs)
        for kind in ("sequential", "batched")
    )
    assert [tuple(a.shape) for a in one] == [(len(p.query), 4) for p in pairs]
    for a, b in zip(one, all_, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    alone = m.logits(params, clients[3].x, torch.ones(7).double(), pairs[3].query)
    torch.testing.assert_close(one[3], alone, rtol=1e-9, atol=1e-9)


def test_unknown_engines_devices_and_precisions_are_refused() -> None:
    m = method("fedavg")
    for settings in ({"name": "warp"}, {"dtype": "float8"}, {"precision": "int4"}):
        with pytest.raises(ConfigError):
            EngineConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        build_engine(EngineConfig(device="abacus"), m, ClientConfig(), [], STREAM)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="use the device cpu"):
            build_engine(EngineConfig(device="cuda"), m, ClientConfig(), [], STREAM)


def trained(**settings: Any) -> Params:
    """psi after two rounds of FLowDUP."""
    config = EngineConfig(device="cpu", **settings)
    parts = MethodContext("cnn-small", SPEC, STREAM, "cpu", torch.float32, config.compute_dtype())
    m = MethodConfig.from_table(METHODS["flowdup"]).build(parts)
    server = ServerConfig(2, 5, optimizer=OptimizerConfig("sgd", 0.5))
    client = ClientConfig(2, 10, 0.5, LOCAL["sgd"])
    runner = build_engine(config, m, client, ragged_clients(), STREAM)
    state = initial_state(server, m, STREAM, torch.device("cpu"), torch.float32)
    *_, last = train(server, m, runner, state, STREAM)
    return last.state.psi


def test_a_traced_step_gives_the_psi_of_one_as_it_is_written() -> None:
    a, b = (trained(name="sequential", compile=compiled) for compiled in (True, False))
    assert distance(a, b) < 1e-6


@pytest.mark.parametrize("kind", ["sequential", "batched"])
def test_bf16_is_near_float32_and_psi_stays_float32(kind: str) -> None:
    start = method("flowdup").init(STREAM.child("psi"))
    a, b = (trained(name=kind, precision=precision) for precision in ("tf32", "bf16"))
    assert {p.dtype for p in b.values()} == {torch.float32}
    assert 0 < distance(a, b) < 0.2 * distance(a, start)


def test_on_a_cpu_clients_run_one_by_one_where_a_batch_is_much_work() -> None:
    for model, kind in (("mlp", BatchedEngine), ("cnn-small", BatchedEngine)):
        m = method("fedavg", model=model)
        assert isinstance(
            build_engine(EngineConfig(device="cpu"), m, ClientConfig(), [], STREAM), kind
        )
    large = ClientConfig(batch_size=2000)
    runner = build_engine(EngineConfig(device="cpu"), method("fedavg"), large, [], STREAM)
    assert isinstance(runner, SequentialEngine)


@pytest.mark.parametrize("name", METHODS)
def test_engines_agree_on_the_loss_of_a_round(name: str) -> None:
    """Clients count once each, however many steps they take."""
    m, clients = method(name, torch.float64, "mlp"), ragged_clients()
    psi = {n: p.double() for n, p in m.init(STREAM).items()}
    task = first_task(m, psi, len(clients))
    config = ClientConfig(2, 10, 0.5, LOCAL["sgd"])
    one, all_ = (
        mean(psi, engine(kind, m, "float64", config, clients).train(task))
        for kind in ("sequential", "batched")
    )
    assert float(one.loss) == pytest.approx(float(all_.loss), rel=1e-9)
