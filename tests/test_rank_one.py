"""Matrices kept as factors: right where the loss applies them once, dense where it does not."""

import warnings

import pytest
import torch
from small import broadcast, client, engine, first_task, method, ragged_clients
from test_methods import batch, batches, doubles, noisy
from torch import Tensor
from torch.func import grad, vmap

from flowdup.aggregation import mean
from flowdup.client import ClientConfig, ClientUpdate
from flowdup.errors import ConfigError
from flowdup.methods import Batch, Params
from flowdup.methods.flowdup import FLowDUP
from flowdup.optimizers import OptimizerConfig
from flowdup.rank_one import NotRankOneError, applied_once, apply

W = "h2.output.weight"
PLAIN = ClientConfig(1, 10, 0.5, OptimizerConfig("sgd", 0.05))


class Twice(FLowDUP):
    """Applies h2's matrices to both halves of a batch."""

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        first, second = batch.halves()
        v = [self.h(params, half.x, half.present) for half in (first, second)]
        return super().loss(params, batch, start) + (v[0] * v[1]).sum()


class Proximal(FLowDUP):
    """Reads every parameter, h2's matrices too."""

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        apart = [(p - start[n]).square().sum() for n, p in params.items()]
        return super().loss(params, batch, start) + torch.stack(apart).sum()


class Multiplied(FLowDUP):
    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return super().loss(params, batch, start) + (2 * params[W]).abs().mean()


class Transposed(FLowDUP):
    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return super().loss(params, batch, start) + (params[W].T @ params["psi_r"]).sum()


class Subsets(FLowDUP):
    """Applies h2's matrices once in Python, to several vectors: under a vmap of its own."""

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        first, second = batch.halves()
        rows = min(len(first.x), len(second.x))
        x, present = (
            torch.stack([a[:rows], b[:rows]])
            for a, b in ((first.x, second.x), (first.present, second.present))
        )
        v = vmap(lambda x, present: self.h(params, x, present))(x, present).mean(0)
        from_loss: Tensor = self.f(self.subspace(v), second.x).square().mean()
        return from_loss


class Inner(FLowDUP):
    """Takes a gradient by the matrices inside the loss."""

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        inner = grad(super().loss)(params, batch, start)
        return torch.stack([g.square().sum() for g in inner.values()]).sum()


class Penalty(FLowDUP):
    """Takes a gradient through the matrices by something else, so they are used in it again."""

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        name = [n for n in params if n.startswith("h1.")][-1]
        first, _ = batch.halves()

        def size(bias: Tensor) -> Tensor:
            return self.h(params | {name: bias}, first.x, first.present).square().sum()

        return super().loss(params, batch, start) + grad(size)(params[name]).square().sum()


ODD = (Penalty, Twice, Proximal, Multiplied, Transposed, Subsets, Inner)


def odd_method(kind: type[FLowDUP]) -> FLowDUP:
    m = method("flowdup", torch.float64)
    assert isinstance(m, FLowDUP)
    m.__class__ = kind
    return m


@pytest.mark.parametrize("kind", ["sequential", "batched"])
@pytest.mark.parametrize("odd", ODD)
def test_a_loss_that_uses_a_matrix_otherwise_gets_the_dense_gradient(
    odd: type[FLowDUP], kind: str
) -> None:
    m, clients = odd_method(odd), ragged_clients()
    psi = noisy(doubles(m))
    task = first_task(m, psi, len(clients))
    with pytest.warns(UserWarning, match="does not apply .* to one vector"):
        found = mean(psi, engine(kind, m, "float64", PLAIN, clients).train(task))
    m.rank_one = ()
    wanted = mean(psi, engine(kind, m, "float64", PLAIN, clients).train(task))
    assert wanted.delta[W].abs().max() > 1e-6
    for name in psi:
        assert (found.delta[name] - wanted.delta[name]).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["flowdup", "pefll"])
def test_factors_multiply_to_the_dense_update(name: str) -> None:
    m = method(name, torch.float64)
    psi, steps = noisy(doubles(m)), batches(client(0, 27), 10)
    task, first = first_task(m, psi), Batch(*(t[0] for t in steps))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        factored = ClientUpdate.for_task(m, PLAIN, task, first)
    assert set(factored.factored) == set(m.rank_one) != set()
    found, wanted = factored(task, steps), ClientUpdate(m, PLAIN)(task, steps)
    assert set(found.factors) == set(m.rank_one) and not wanted.factors
    for n, p in wanted.delta.items():
        assert (found.whole_delta()[n] - p).abs().max() < 1e-12


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig("sgd", 0.05, weight_decay=0.1),
        OptimizerConfig("sgd", 0.05, momentum=0.9),
        OptimizerConfig("adam", 0.05),
    ],
    ids=["decay", "momentum", "adam"],
)
def test_a_step_that_is_no_multiple_of_the_gradient_moves_whole_matrices(
    optimizer: OptimizerConfig,
) -> None:
    """Weight decay, momentum and Adam change a matrix by more than outer products."""
    m, config = method("flowdup", torch.float64), ClientConfig(1, 10, 0.5, optimizer)
    psi, steps = noisy(doubles(m)), batches(client(0, 27), 10)
    task, first = first_task(m, psi), Batch(*(t[0] for t in steps))
    found = ClientUpdate.for_task(m, config, task, first)(task, steps).whole_delta()
    wanted = ClientUpdate(m, config)(task, steps).delta
    assert all(torch.allclose(found[n], wanted[n], atol=1e-12) for n in psi)


def test_only_the_matrix_that_is_read_loses_its_factors() -> None:
    m = odd_method(Multiplied)
    psi, data = noisy(doubles(m)), batch(client(0, 20))
    with pytest.warns(UserWarning, match=f"apply {W} to"):
        kept = applied_once(lambda p: m.loss(p, data, psi | broadcast(m, psi)), psi, m.rank_one)
    assert kept == ("h2.hidden.weight",)


def test_a_name_that_is_no_matrix_is_refused() -> None:
    for name in ("psi_r", "nothing"):
        with pytest.raises(ConfigError, match=f"'{name}', which is no matrix"):
            applied_once(lambda psi: psi["psi_r"].sum(), {"psi_r": torch.zeros(3)}, [name])


def test_an_error_of_the_loss_itself_is_not_taken_for_one_of_the_matrices() -> None:
    def broken(params: Params) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        applied_once(broken, {"w": torch.zeros(2, 2)}, ["w"])


def test_a_loss_that_changes_its_mind_later_is_an_error_and_never_a_wrong_gradient() -> None:
    calls = [0]

    class Fickle(FLowDUP):
        def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
            calls[0] += 1
            extra = apply(params[W], torch.ones(10).double(), params["psi_r"]).sum()
            return (
                extra
                if calls[0] < 3
                else extra + apply(params[W], torch.ones(10).double(), params["psi_r"]).sum()
            )

    m = odd_method(Fickle)
    psi, steps = noisy(doubles(m)), batches(client(0, 27), 10)
    task = first_task(m, psi)
    update = ClientUpdate.for_task(m, PLAIN, task, Batch(*(t[0] for t in steps)))
    assert W in update.factored
    with pytest.raises(NotRankOneError, match=f"uses the matrix '{W}' otherwise"):
        update(task, steps)
