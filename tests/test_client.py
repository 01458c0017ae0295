import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowdup.batches import batch_plan, local_batches
from flowdup.client import ClientConfig
from flowdup.data import ClientData
from flowdup.errors import ConfigError
from flowdup.methods import Batch
from flowdup.optimizers import Optimizer, OptimizerConfig
from flowdup.random import Stream
from flowdup.rank_one import FactoredGradient, Outer


@given(st.integers(1, 120), st.integers(2, 50), st.integers(1, 3), st.integers(0, 5))
def test_every_epoch_uses_every_point_once_in_halves_that_differ_by_one_at_most(
    points: int, size: int, epochs: int, position: int
) -> None:
    plan = batch_plan(Stream(0), position, points, epochs, size)
    per_epoch = -(-points // size)
    assert plan.shape == (epochs * per_epoch, size)
    for rows in np.split(plan, epochs):
        assert sorted(rows[rows >= 0]) == list(range(points))
    cut = (size + 1) // 2
    first, second = (plan[:, :cut] >= 0).sum(1), (plan[:, cut:] >= 0).sum(1)
    assert ((first - second == 0) | (first - second == 1)).all()
    assert (first >= 1).all()


@given(st.integers(1, 40), st.integers(2, 11))
def test_the_halves_of_a_batch_are_those_that_its_plan_filled(points: int, size: int) -> None:
    """For even and odd sizes: of n points the first half has ceil(n/2)."""
    plan = batch_plan(Stream(0), 0, points, 1, size)
    client = ClientData(torch.arange(points).reshape(-1, 1))
    steps = local_batches(client, plan, torch.device("cpu"), torch.float64)
    for number, row in enumerate(plan):
        there = int((row >= 0).sum())
        halves = Batch(*(t[number] for t in steps)).halves()
        assert [int(half.present.sum()) for half in halves] == [(there + 1) // 2, there // 2]
        for half in halves:  # each filled from its start
            assert half.present.tolist() == sorted(half.present.tolist(), reverse=True)


def test_epochs_positions_and_streams_have_orders_of_their_own() -> None:
    first, second = np.split(batch_plan(Stream(0), 0, 30, 2, 10), 2)
    other_position = batch_plan(Stream(0), 1, 30, 2, 10)[:3]
    other_stream = batch_plan(Stream(1), 0, 30, 2, 10)[:3]
    assert len({a.tobytes() for a in (first, second, other_position, other_stream)}) == 4


@pytest.mark.parametrize("settings", [{"epochs": 0}, {"batch_size": 1}, {"clip": -1}])
def test_senseless_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ClientConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (OptimizerConfig("sgd", 0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (
            OptimizerConfig("sgd", 0.1, momentum=0.9, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
        ),
        (
            OptimizerConfig("adam", 0.1, weight_decay=0.01),
            lambda p: torch.optim.Adam(p, 0.1, (0.9, 0.99), 1e-6, weight_decay=0.01),
        ),
    ],
)
def test_optimizers_step_as_torch_does(config: OptimizerConfig, reference) -> None:  # type: ignore[no-untyped-def]
    start = torch.linspace(-1, 1, 7, dtype=torch.float64)
    theirs = start.clone().requires_grad_()
    torch_optimizer = reference([theirs])
    ours, optimizer = {"p": start}, Optimizer(config)
    state = optimizer.init(ours)
    for step in range(5):
        gradient = torch.sin(ours["p"] * 3 + step)
        theirs.grad = torch.sin(theirs.detach() * 3 + step)
        ours, state = optimizer.step(ours, {"p": gradient}, state)
        torch_optimizer.step()
    assert torch.allclose(ours["p"], theirs.detach(), atol=1e-12)


def test_unknown_optimizers_and_rates_that_are_not_positive_are_refused() -> None:
    with pytest.raises(ConfigError, match="sgd or adam"):
        Optimizer(OptimizerConfig("lion"))
    for lr in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="positive"):
            Optimizer(OptimizerConfig(lr=lr))


def test_a_long_gradient_is_cut_to_the_limit_and_a_short_one_left() -> None:
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    cut = FactoredGradient(grads, {}).clipped(1.0).dense
    assert (cut["a"].item(), cut["b"].item()) == pytest.approx((0.6, 0.8))
    assert FactoredGradient(grads, {}).clipped(6.0) == (grads, {})
    assert FactoredGradient({"a": torch.zeros(2)}, {}).clipped(1.0).dense["a"].tolist() == [0, 0]


def test_an_outer_product_counts_in_the_norm_as_the_matrix_that_it_is() -> None:
    outer = Outer(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0, 1.0]))
    grads = {"b": torch.tensor([4.0])}
    matrix = {"w": torch.outer(outer.g, outer.a)}
    whole = FactoredGradient(grads | matrix, {}).clipped(1.0).dense
    rest, cut = FactoredGradient(grads, {"w": outer}).clipped(1.0)
    assert torch.allclose(rest["b"], whole["b"])
    assert torch.allclose(torch.outer(*cut["w"]), whole["w"])
