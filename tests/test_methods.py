"""The objective, written out by hand, against the code; every edge that the paper names."""

import math

import pytest
import torch
from small import METHODS, broadcast, client, first_task, method
from torch import Tensor
from torch.func import grad, grad_and_value

from flowdup.batches import batch_plan, local_batches
from flowdup.client import ClientConfig, ClientUpdate
from flowdup.data import ClientData
from flowdup.methods import Batch, Method, Params
from flowdup.optimizers import OptimizerConfig
from flowdup.random import Stream


def batches(data: ClientData, size: int = 20) -> Batch:
    plan = batch_plan(Stream(0), 0, len(data), 1, size)
    return local_batches(data, plan, torch.device("cpu"), torch.float64)


def batch(data: ClientData, size: int = 20) -> Batch:
    """The first local batch."""
    return Batch(*(t[0] for t in batches(data, size)))


def doubles(m: Method, seed: int = 1) -> Params:
    return {n: p.double() for n, p in m.init(Stream(seed)).items()}


def noisy(params: Params) -> Params:
    """Away from the start, where much is zero."""
    draw = Stream(99)
    return {
        n: p + 0.05 * torch.from_numpy(draw.child(n).uniform(p.numel())).reshape(p.shape)
        for n, p in params.items()
    }


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("labeled", [True, False])
def test_gradients_are_those_of_finite_differences(name: str, labeled: bool) -> None:
    m = method(name, torch.float64)
    params, data = noisy(doubles(m)), batch(client(0, 13, labeled))
    start = params | broadcast(m, params)
    found = grad(m.loss)(params, data, start)
    for number in range(8):
        direction = {
            n: torch.from_numpy(Stream(number).child(n).uniform(p.numel()))
            .double()
            .reshape(p.shape)
            for n, p in params.items()
        }
        eps = 1e-6
        ahead, behind = (
            m.loss({n: p + s * eps * direction[n] for n, p in params.items()}, data, start)
            for s in (1, -1)
        )
        expected = float(ahead - behind) / (2 * eps)
        slope = sum(float((found[n] * direction[n]).sum()) for n in params)
        assert slope == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_the_objective_is_the_papers_written_out() -> None:
    m = method("flowdup", torch.float64)
    params, data = noisy(doubles(m)), batch(client(0, 20))
    first, second = data.halves()
    h1 = {n.removeprefix("h1."): p for n, p in params.items() if n.startswith("h1.")}
    r = torch.stack([m.h.h1(h1, x[None])[0] for x in first.x]).mean(0)  # type: ignore[attr-defined]
    r = (r - r.mean()) / (r.var(unbiased=False) + 1e-5).sqrt()
    hidden = (params["h2.hidden.weight"] @ r + params["h2.hidden.bias"]).clamp(min=0)
    v = params["h2.output.weight"] @ hidden + params["h2.output.bias"]
    theta = m.subspace(v)  # type: ignore[attr-defined]
    losses = []
    for x, y in zip(second.x, second.y, strict=True):
        logits = m.f(theta, x[None])[0]
        losses.append(float(logits.exp().sum().log() - logits[y]))
    omega = float(((v - params["psi_r"]) ** 2).sum())
    expected = math.fsum(losses) / 10 + 1e-2 * omega
    assert float(m.loss(params, data, params)) == pytest.approx(expected, rel=1e-10)


def test_sum_is_mean_times_the_labeled_rows() -> None:
    m = method("flowdup-hashed", torch.float64)
    params, data = noisy(doubles(m)), batch(client(0, 20))
    unlabeled = data._replace(labeled=0 * data.labeled)
    total = m.loss(params, data, params) - m.loss(params, unlabeled, params)
    m.config = m.config.__class__(1e-4, "mean")  # type: ignore[attr-defined]
    mean = m.loss(params, data, params) - m.loss(params, unlabeled, params)
    assert float(total) == pytest.approx(10 * float(mean), rel=1e-9)


def test_the_half_that_generates_is_never_scored_and_labels_of_it_do_not_matter() -> None:
    m = method("flowdup", torch.float64)
    params, data = noisy(doubles(m)), batch(client(0, 20))
    other = data._replace(y=torch.cat([(data.y[:10] + 1) % 4, data.y[10:]]))
    assert m.loss(params, data, params) == m.loss(params, other, params)
    changed = data._replace(y=torch.cat([data.y[:10], (data.y[10:] + 1) % 4]))
    assert m.loss(params, data, params) != m.loss(params, changed, params)


def test_an_unlabeled_client_moves_only_through_the_regularizer() -> None:
    m = method("flowdup", torch.float64)
    params, data = noisy(doubles(m)), batch(client(1, 20, labeled=False))
    first, _ = data.halves()

    def regularizer(params: Params) -> Tensor:
        v = m.h(params, first.x, first.present)  # type: ignore[attr-defined]
        return 1e-2 * (v - params["psi_r"]).square().sum()

    found, expected = grad(m.loss)(params, data, params), grad(regularizer)(params)
    assert all(torch.allclose(found[n], expected[n], atol=1e-14) for n in params)
    assert found["psi_r"].abs().max() > 0


@pytest.mark.parametrize(
    "name", [n for n in METHODS if "flowdup" not in n and n != "fedavg-pseudo"]
)
def test_a_method_of_labels_alone_learns_nothing_from_an_unlabeled_client(name: str) -> None:
    m = method(name, torch.float64)
    params, data = noisy(doubles(m)), batch(client(1, 20, labeled=False))
    gradient = grad(m.loss)(params, data, params | broadcast(m, params))
    assert all((g == 0).all() for g in gradient.values())
    assert not m.learns_unlabeled


def test_a_client_with_one_labeled_point_contributes_the_regularizer_alone() -> None:
    m = method("flowdup", torch.float64)
    params = noisy(doubles(m))
    one = client(2, 1)
    with_label, without = batch(one), batch(one.unlabeled())
    assert m.loss(params, with_label, params) == m.loss(params, without, params)
    assert torch.isfinite(m.loss(params, with_label, params))


def test_points_without_a_label_do_not_count_in_the_loss() -> None:
    m = method("fedavg", torch.float64)
    params, some = noisy(doubles(m)), client(0, 20)
    assert some.y is not None
    hidden = ClientData(some.x, torch.where(torch.arange(20) < 12, some.y, -1))
    only = ClientData(some.x[:12], some.y[:12])
    a, b = (float(m.loss(params, batch(c), params)) for c in (hidden, only))
    assert a == pytest.approx(b, rel=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_client_update_is_as_many_gradient_steps_as_there_are_batches(name: str) -> None:
    m = method(name, torch.float64)
    params = noisy(doubles(m))
    steps = batches(client(0, 27), 10)
    config = ClientConfig(clip=0.0, optimizer=OptimizerConfig("sgd", 0.1, weight_decay=0.01))
    reply = ClientUpdate(m, config)(first_task(m, params), steps)
    found, now = reply.whole_delta(), params
    for i in range(3):
        gradient = grad(m.loss)(now, Batch(*(t[i] for t in steps)), params | broadcast(m, params))
        now = {n: p - 0.1 * (gradient[n] + 0.01 * p) for n, p in now.items()}
    assert all(torch.allclose(found[n], now[n] - params[n], atol=1e-12) for n in params)


def test_a_replys_loss_is_the_mean_over_its_steps() -> None:
    m = method("fedavg", torch.float64)
    params, steps = noisy(doubles(m)), batches(client(0, 27), 10)
    config = ClientConfig(clip=0.0, optimizer=OptimizerConfig("sgd", 0.1))
    reply, now, losses = ClientUpdate(m, config)(first_task(m, params), steps), params, []
    for i in range(3):
        gradient, loss = grad_and_value(m.loss)(now, Batch(*(t[i] for t in steps)), params)
        now = {n: p - 0.1 * gradient[n] for n, p in now.items()}
        losses.append(float(loss))
    assert float(reply.loss) == pytest.approx(sum(losses) / 3, rel=1e-12)
    assert len(set(losses)) == 3


ONE_MODEL = ("fedavg", "fedavg-la", "fedavg-pseudo", "fedprox", "ld-fedavg", "lame")
OF_A_CLUSTER = ("flux",)  # these two clients may be in one


@pytest.mark.parametrize(
    ("name", "differ"), [(n, n not in ONE_MODEL) for n in METHODS if n not in OF_A_CLUSTER]
)
def test_clients_have_models_of_their_own_where_the_method_personalizes(
    name: str, differ: bool
) -> None:
    m = method(name)
    rates_start_at_zero = name == "atp"
    params = m.init(Stream(1))
    params = noisy(params) if rates_start_at_zero else params
    a, b = (m.personalize(params, client(i, 20).x, torch.ones(20)) for i in (0, 2))
    assert any((a[n] != b[n]).any() for n in a) == differ
