"""A compiled step does what the step does, whichever pieces of torch there are."""

import shutil

import pytest
import torch
from small import STREAM, broadcast, method, ragged_clients
from torch import Tensor
from torch.func import grad, vmap

from flowdup.accelerate import torch_private
from flowdup.accelerate.compiling import CompiledStep, EagerStep
from flowdup.accelerate.torch_private import SWITCH
from flowdup.aggregation import total
from flowdup.client import ClientConfig
from flowdup.engines.batched import BatchedEngine
from flowdup.messages import Task

State = dict[str, Tensor]
PIECES = ["make_fx", "standalone_compile", "force_stride_order"]


def without(monkeypatch: pytest.MonkeyPatch, *pieces: str) -> None:
    monkeypatch.setenv(SWITCH, ",".join(pieces))
    monkeypatch.setattr(torch_private, "_found", {})


def step(fixed: State, state: State, x: Tensor, y: Tensor) -> State:
    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([(x @ w).tanh(), x @ w], 1).square().mean() + (y - w.sum()).square()

    slopes = vmap(grad(loss))(state["w"], x, y)
    return {"w": state["w"] - fixed["rate"] * slopes, "steps": state["steps"] + 1}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check() -> None:
    """Two rounds of three steps, beside the step as it is written."""
    state = {"w": random(3, 5, 4, seed=0), "steps": torch.zeros(())}
    batches = [(random(3, 6, 5, seed=i), random(3, seed=i)) for i in range(1, 4)]
    before = {n: t.clone() for n, t in state.items()}
    compiled = CompiledStep(step, {"rate": torch.tensor(9.0)}, state, *batches[0])
    for name, tensor in compiled.state.items():
        tensor.copy_(state[name])
    eager = EagerStep(step, {}, state)
    for rate in (torch.tensor(0.01), torch.tensor(0.02)):
        compiled.begin({"rate": rate})
        eager.fixed = {"rate": rate}
        for batch in batches:
            compiled(*batch)
            eager(*batch)
        for name, wanted in eager.state.items():
            assert torch.allclose(compiled.state[name], wanted, atol=1e-5), name
    assert compiled.state["steps"] == 6
    assert all(torch.equal(state[n], t) for n, t in before.items())  # the caller's stay


@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for a CPU with a C++ compiler")
def test_a_compiled_step_does_what_the_step_does() -> None:
    check()


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.filterwarnings("ignore:flowdup does without")
def test_without_a_compiler_a_step_does_the_same(
    monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    without(monkeypatch, piece, "_foreach_copy_")
    check()
    assert torch_private.look_up(piece) is None


@pytest.mark.parametrize("piece", PIECES[:2])
@pytest.mark.parametrize("name", ["flowdup", "fedprox"])
@pytest.mark.filterwarnings("ignore:flowdup does without")
def test_a_step_that_could_not_be_compiled_trains_the_same_in_the_batched_engine(
    monkeypatch: pytest.MonkeyPatch, name: str, piece: str
) -> None:
    """Round after round with one step, for cohorts of other sizes, too."""
    without(monkeypatch, piece, "_foreach_zero_")
    m = method(name, torch.float64)
    psi = {n: p.double() for n, p in m.init(STREAM).items()}
    sent = broadcast(m, psi)
    here = ragged_clients(), STREAM, torch.device("cpu"), torch.float64
    both = [BatchedEngine(m, ClientConfig(1, 10), *here, 0, compiled) for compiled in (False, True)]
    for cohort in ({0: 0, 1: 1, 2: 2}, {0: 3, 1: 5, 2: 6}, {0: 4, 1: 2}):
        a, b = (total(e.train(Task(1, psi, sent, cohort))) for e in both)
        assert torch.allclose(a.loss, b.loss)
        for n, change in a.delta.items():
            assert torch.allclose(b.delta[n], change, atol=1e-12), n
