"""Training on a GPU: a compiled and captured step gives the psi of a plain one and of a CPU."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from small import METHODS, SPEC, STREAM, ragged_clients

from flowdup.client import ClientConfig
from flowdup.engines import EngineConfig, build_engine
from flowdup.methods import MethodConfig, MethodContext, Params
from flowdup.methods.lame import LAME, Points
from flowdup.optimizers import OptimizerConfig
from flowdup.server import ServerConfig, initial_state, train

DEVICE = "cuda"
LOCAL = {
    "sgd": OptimizerConfig("sgd", 0.02),
    "momentum": OptimizerConfig("sgd", 0.01, momentum=0.9, weight_decay=1e-3),
}
CASES = [(name, "sgd") for name in METHODS] + [("flowdup", "momentum"), ("fedavg", "momentum")]


@cache
def psi_after(
    name: str,
    local: str,
    device: str,
    engine: str,
    precision: str,
    compiled: bool,
    rounds: int,
    augmented: bool = False,
) -> Params:
    config = EngineConfig(engine, device, "float32", 0, precision, compiled)
    place, dtype = config.torch_device(), config.torch_dtype()
    context = MethodContext("cnn-small", SPEC, STREAM, place, dtype, config.compute_dtype())
    method = MethodConfig.from_table(METHODS[name]).build(context)
    client = ClientConfig(2, 10, 0.5, LOCAL[local])
    if augmented:
        client = replace(client, mirror=True, shift=2, rotate_batches=True)
    server = ServerConfig(rounds, 5, 0.6, optimizer=OptimizerConfig("sgd", 0.5, momentum=0.5))
    runner = build_engine(config, method, client, ragged_clients(), STREAM)
    state = initial_state(server, method, STREAM, place, dtype)
    if rounds:
        *_, last = train(server, method, runner, state, STREAM)
        state = last.state
    return {n: p.cpu() for n, p in state.psi.items()}


def distance(a: Params, b: Params) -> float:
    assert a.keys() == b.keys()
    return float(torch.stack([(a[n] - b[n]).square().sum() for n in a]).sum().sqrt())


def start_of(name: str) -> Params:
    context = MethodContext("cnn-small", SPEC, STREAM)
    return MethodConfig.from_table(METHODS[name]).build(context).init(STREAM.child("psi"))


@pytest.mark.parametrize(("name", "local"), CASES)
def test_captured_eager_and_cpu_give_the_same_psi(name: str, local: str) -> None:
    ways = {
        "captured": (DEVICE, "batched", "float32", True),
        "eager": (DEVICE, "batched", "float32", False),
        "sequential": (DEVICE, "sequential", "float32", True),
        "cpu": ("cpu", "batched", "float32", False),
    }
    psi = {way: psi_after(name, local, *settings, 4) for way, settings in ways.items()}
    moved = distance(psi["cpu"], start_of(name))
    assert moved > 1e-2
    for way in ("captured", "eager", "sequential"):
        assert distance(psi[way], psi["cpu"]) < 1e-3 * moved, way


def test_augmented_images_give_a_captured_step_the_psi_of_a_cpu() -> None:
    plain, captured, cpu = (
        psi_after("flowdup", "sgd", device, "batched", "float32", compiled, 4, augmented)
        for device, compiled, augmented in (
            (DEVICE, True, False),
            (DEVICE, True, True),
            ("cpu", False, True),
        )
    )
    moved = distance(cpu, start_of("flowdup"))
    assert distance(captured, cpu) < 1e-3 * moved
    assert distance(captured, plain) > 1e-2 * moved


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_in_tensor_core_precisions(name: str, precision: str) -> None:
    near, exact = (
        psi_after(name, "sgd", DEVICE, "batched", kind, True, 4) for kind in (precision, "float32")
    )
    assert {p.dtype for p in near.values()} == {torch.float32}
    limit = 0.05 if precision == "tf32" else 0.3  # FedTTA, of second order, enlarges rounding
    assert distance(near, exact) < limit * distance(exact, start_of(name))


def test_a_cohort_in_few_slots_gives_the_psi_of_one_in_many() -> None:
    config = EngineConfig("batched", DEVICE, "float32", 2, "float32")
    context = MethodContext("cnn-small", SPEC, STREAM, config.torch_device())
    method = MethodConfig.from_table(METHODS["flowdup"]).build(context)
    client = ClientConfig(2, 10, 0.5, LOCAL["sgd"])
    server = ServerConfig(4, 5, 0.6, optimizer=OptimizerConfig("sgd", 0.5, momentum=0.5))
    runner = build_engine(config, method, client, ragged_clients(), STREAM)
    state = initial_state(server, method, STREAM, config.torch_device(), torch.float32)
    *_, last = train(server, method, runner, state, STREAM)
    few = {n: p.cpu() for n, p in last.state.psi.items()}
    many = psi_after("flowdup", "sgd", DEVICE, "batched", "float32", True, 4)
    assert distance(few, many) < 1e-3 * distance(many, start_of("flowdup"))


def test_training_moves_no_random_state_of_the_gpu() -> None:
    torch.cuda.manual_seed(1234)
    before = torch.cuda.get_rng_state()
    psi_after("flowdup", "sgd", DEVICE, "batched", "float32", True, 3)
    psi_after("flowdup", "sgd", DEVICE, "sequential", "float32", True, 3)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_point_is_not_its_own_neighbour_though_products_are_rounded() -> None:
    """TF32 has ten bits: a point's cosine with itself is then seldom 1."""
    config = EngineConfig("batched", DEVICE, "float32", 0, "tf32", False)
    place, dtype = config.torch_device(), config.torch_dtype()
    lame = MethodConfig.from_table({"name": "lame"}).build(
        MethodContext("cnn-small", SPEC, STREAM, place, dtype)
    )
    build_engine(config, lame, ClientConfig(), ragged_clients(), STREAM)  # switches TF32 on
    assert isinstance(lame, LAME)
    draw = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(100, 128, generator=draw).relu()).to(place)
    points = Points(torch.zeros(100, 3, device=place), features)
    found = lame.neighbors(points, points, torch.ones(100, device=place))
    own = found.rows == torch.arange(100, device=place)[:, None]
    assert bool(own.any(1).all()) and not bool(found.weight[own].any())
    assert found.weight.sum(1).tolist() == [5.0] * 100
