"""FLowDUP+, logit adjustment and pseudo-labels, each written out in plain torch."""

from typing import Any

import pytest
import torch
from small import METHODS, SPEC, STREAM, client, method
from test_methods import batch, doubles, noisy
from torch import Tensor
from torch.func import grad
from torch.nn.functional import cross_entropy

from flowdup.errors import FlowdupError
from flowdup.hypernetwork import HypernetworkConfig
from flowdup.methods import METHODS as ALL
from flowdup.methods import Batch, Method, MethodConfig, MethodContext, Params
from flowdup.models import Weights
from flowdup.params import strip_prefix
from flowdup.prior import log_prior
from flowdup.random import Stream

EXACT = torch.float64
PLUS = METHODS["flowdup-plus"] | {"correction": "none"}


def build(table: dict[str, Any], start: Weights | None = None) -> Method:
    context = MethodContext("cnn-small", SPEC, STREAM, "cpu", EXACT, start=start)
    return MethodConfig.from_table(table).build(context)


def a_start(seed: int = 5) -> Weights:
    """A model's weights, as a stage before leaves them."""
    return noisy(MethodContext("cnn-small", SPEC, Stream(seed)).f.init(Stream(seed)))


def in_double(weights: Weights) -> Weights:
    return {n: w.to(EXACT) for n, w in weights.items()}


def adjusted(logits: Tensor, y: Tensor, share: float) -> Tensor:
    """Of points that all have labels."""
    q = torch.stack([(y == c).to(EXACT).mean() for c in range(4)]).clamp(min=1e-4)
    return (1 - share) * cross_entropy(logits, y) + share * cross_entropy(logits + q.log(), y)


# FLowDUP+


def plus_written_out(
    m: Any, params: Params, began: Params, data: Batch, start: Weights | None, table: dict[str, Any]
) -> Tensor:
    """The objective on a full and labeled batch of 20."""
    x, y = data.x, data.y
    z = m.h.h1(strip_prefix(params, "h1."), x[:10])
    r = torch.cat([z.mean(0), z.std(0, correction=0)])
    r = (r - r.mean()) / (r.var(correction=0) + 1e-5).sqrt()
    hidden = (params["h2.hidden.weight"] @ r + params["h2.hidden.bias"]).relu()
    v = params["h2.output.weight"] @ hidden + params["h2.output.bias"]
    theta = m.subspace(v)
    if table["train_theta"]:  # theta_0 gives way to theta as the round began
        theta = {n: w - t for (n, w), t in zip(theta.items(), at_zero(m).values(), strict=True)}
        theta = {n: w + began[f"theta.{n}"] for n, w in theta.items()}
    logits = m.f(theta, x[10:])
    if start:
        logits = logits + log_prior(
            m.f(in_double(start), x[:10]), torch.ones(10, dtype=EXACT), 0.03
        )
    loss = cross_entropy(logits, y[10:]) + 1e-2 * (v - params["psi_r"]).square().sum()
    if table["head"]:
        own = z @ params["head.weight"].T + params["head.bias"]
        loss = loss + table["head"] * cross_entropy(own, y[:10])
    if table["train_theta"]:
        for_all = adjusted(m.f(strip_prefix(params, "theta."), x), y, 0.5)
        loss = for_all + table["personal"] * loss
    return loss


def at_zero(m: Any) -> Weights:
    found: Weights = m.subspace(torch.zeros(m.k, dtype=EXACT))
    return found


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("head", [0.3, 0.0])
@pytest.mark.parametrize("train_theta", [True, False])
def test_the_objective_of_flowdup_plus_is_its_docstring_written_out(
    begun: bool, head: float, train_theta: bool
) -> None:
    table = PLUS | {"head": head, "train_theta": train_theta, "personal": 0.7}
    start = a_start() if begun else None
    m = build(table, start)
    params, began, data = noisy(doubles(m)), doubles(m, 2), batch(client(0, 20))
    found = m.loss(params, data, began)
    wanted = plus_written_out(m, params, began, data, start, table)
    assert float(found) == pytest.approx(float(wanted), rel=1e-10)


def test_without_a_stage_before_class_shares_play_no_part() -> None:
    data = batch(client(0, 20))
    losses = {}
    for begun in (True, False):
        for prior in (True, False):
            m = build(PLUS | {"prior": prior}, a_start() if begun else None)
            params = noisy(doubles(m))
            losses[begun, prior] = float(m.loss(params, data, params))
    assert losses[False, True] == losses[False, False]
    assert losses[True, True] != losses[True, False]


def test_theta_learns_by_its_own_loss_alone_and_h_by_the_personal_one() -> None:
    m = build(PLUS | {"personal": 0.0, "adjusted": 0.0}, a_start())
    params, data = noisy(doubles(m)), batch(client(0, 20))
    found = grad(m.loss)(params, data, params)
    fedavg = method("fedavg", EXACT)
    theta = strip_prefix(params, "theta.")
    wanted = grad(fedavg.loss)(theta, data, theta)
    assert all(torch.allclose(found[f"theta.{n}"], g, atol=1e-13) for n, g in wanted.items())
    assert all((g == 0).all() for n, g in found.items() if not n.startswith("theta."))
    whole = build(PLUS | {"adjusted": 0.0}, a_start())
    both = grad(whole.loss)(params, data, params)
    assert all(torch.equal(both[f"theta.{n}"], found[f"theta.{n}"]) for n in theta)
    assert both["h2.output.weight"].abs().max() > 0


def test_what_psi_holds_is_what_is_trained() -> None:
    def kinds(**settings: Any) -> set[str]:
        names = build(PLUS | settings, a_start()).init(Stream(1))
        return {n.partition(".")[0] for n in names}

    assert kinds() == {"theta", "h1", "h2", "psi_r", "head"}
    assert kinds(head=0.0) == {"theta", "h1", "h2", "psi_r"}
    assert kinds(train_theta=False) == {"h1", "h2", "psi_r", "head"}
    assert kinds(learn_psi_r=False) == {"theta", "h1", "h2", "head"}


@pytest.mark.parametrize("train_theta", [True, False])
def test_a_personal_model_is_theta_and_the_move_that_h_makes(train_theta: bool) -> None:
    start = a_start()
    m: Any = build(PLUS | {"train_theta": train_theta}, start)
    params, x, present = noisy(doubles(m)), client(0, 13).x, torch.ones(13, dtype=EXACT)
    moved, still = m.subspace(m.h(params, x, present)), at_zero(m)
    own = m.personalize(params, x, present)
    for n in own:
        base = params[f"theta.{n}"] if train_theta else in_double(start)[n]
        assert torch.allclose(own[n], base + moved[n] - still[n], atol=1e-12)


# Beginning from a model


def test_h1s_trunk_begins_from_the_models_weights_and_its_last_layer_does_not() -> None:
    start = a_start()
    for name in ("flowdup", "flowdup-plus"):
        h1 = strip_prefix(build(METHODS[name], start).init(Stream(1)), "h1.")
        drawn = strip_prefix(build(METHODS[name]).init(Stream(1)), "h1.")
        assert h1.keys() == start.keys()
        *trunk, weight, bias = start
        assert all(torch.equal(h1[n], start[n]) for n in trunk)
        assert all(torch.equal(h1[n], drawn[n]) for n in (weight, bias))
        assert h1[weight].shape[0] == 12


def test_a_subspace_goes_through_the_model_that_it_begins_from() -> None:
    start = a_start()
    m: Any = build(METHODS["flowdup"], start)
    plain: Any = build(METHODS["flowdup"])
    assert all(torch.equal(w, in_double(start)[n]) for n, w in at_zero(m).items())
    v = torch.linspace(-1, 1, m.k, dtype=EXACT)
    here, there = m.subspace(v), plain.subspace(v)
    for n, w in at_zero(plain).items():
        assert torch.allclose(here[n] - in_double(start)[n], there[n] - w, atol=1e-12)
        given = plain.subspace(v, in_double(start))[n]
        assert torch.equal(given, here[n])
    assert m.fingerprint != plain.fingerprint
    assert m.fingerprint == build(METHODS["flowdup"], a_start()).fingerprint


@pytest.mark.parametrize("name", ["fedavg", "fedavg-la", "fedavg-pseudo", "fedprox", "fedavg-em"])
def test_a_method_of_one_model_begins_as_the_model_it_is_given(name: str) -> None:
    start = a_start()
    m = build(METHODS[name], start)
    found = m.global_model(m.init(Stream(1)))
    assert all(torch.equal(found[n], start[n]) for n in start)


# The model for everyone


@pytest.mark.parametrize("name", METHODS)
def test_every_method_that_learns_a_model_for_everyone_gives_it(name: str) -> None:
    m: Any = build(METHODS[name] | {"correction": "none"})
    params = noisy(doubles(m))
    kind = METHODS[name]["name"]
    if kind in ("pefll", "odpfl-hn", "flux", "arm-cml"):
        with pytest.raises(FlowdupError, match="no model for everyone"):
            m.global_model(params)
        return
    if kind == "flowdup":
        v = params.get("psi_r", torch.zeros(m.k, dtype=EXACT))
        wanted = m.subspace(v)
    elif kind == "ld-fedavg":
        wanted = m.subspace(params["v"])
    else:
        wanted = strip_prefix(params, "theta.") or {n: params[n] for n in m.f.shapes}
    found = m.global_model(params)
    assert found.keys() == m.f.shapes.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_only_methods_with_a_model_for_everyone_interpolate() -> None:
    assert {n for n, e in ALL.items() if e.method.interpolates} == {"flowdup", "flowdup-plus"}


def test_with_theta_fixed_the_model_for_everyone_is_flowdups() -> None:
    m: Any = build(PLUS | {"train_theta": False}, a_start())
    params = noisy(doubles(m))
    wanted = m.subspace(params["psi_r"])
    assert all(torch.equal(w, wanted[n]) for n, w in m.global_model(params).items())


# Pooling


@pytest.mark.parametrize("chunk", [2048, 4])
def test_mean_std_is_the_mean_and_the_deviation_of_points_that_are_there(chunk: int) -> None:
    context = MethodContext("cnn-small", SPEC, STREAM, "cpu", EXACT)
    config = HypernetworkConfig(embedding=12, hidden=10, pooling="mean-std", chunk=chunk)
    h = context.hypernetwork(config, 30)
    params = {n: p.double() for n, p in h.init(Stream(1)).items()}
    assert params["h2.hidden.weight"].shape == (10, 24)
    x, present = client(0, 13).x, (torch.arange(13) < 9).to(EXACT)
    z = h.h1(strip_prefix(params, "h1."), x[:9])
    wanted = torch.cat([z.mean(0), torch.std(z, 0, correction=0)])
    assert torch.allclose(h.embedding(params, x, present), wanted, atol=1e-10)
    one = h.embedding(params, x[:1], present[:1])
    assert torch.allclose(one[:12], z[0], atol=1e-12)
    assert (one[12:] <= 1e-3 + 1e-9).all()
    slope = grad(lambda p: h(p, x[:1], present[:1]).sum())(params)
    assert all(torch.isfinite(g).all() for g in slope.values())


# Logit adjustment


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_fedavg_la_adds_the_batchs_label_shares(share: float) -> None:
    m = build({"name": "fedavg-la", "adjusted": share})
    params, data = noisy(doubles(m)), batch(client(0, 20))
    wanted = adjusted(m.f(params, data.x), data.y, share)
    assert float(m.loss(params, data, params)) == pytest.approx(float(wanted), rel=1e-10)
    if share == 0:
        assert torch.equal(
            m.loss(params, data, params), build({"name": "fedavg"}).loss(params, data, params)
        )


def test_only_labels_that_a_client_has_count_as_its_shares() -> None:
    m = build({"name": "fedavg-la"})
    params, data = noisy(doubles(m)), batch(client(0, 20))
    some = data._replace(labeled=(torch.arange(20) < 7).to(EXACT))
    wanted = adjusted(m.f(params, data.x[:7]), data.y[:7], 0.5)
    assert float(m.loss(params, some, params)) == pytest.approx(float(wanted), rel=1e-10)


# Pseudo-labels

PSEUDO = {"name": "fedavg-pseudo", "threshold": 0.0, "prior": False, "adjusted": 0.0}


def mixed_batch() -> Batch:
    """The last five points are padding, and of the others every second has a label."""
    data, rows = batch(client(0, 20)), torch.arange(20)
    there = (rows < 15).to(EXACT)
    return data._replace(present=there, labeled=there * (rows % 2))


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("prior", [True, False])
def test_a_point_with_a_label_keeps_it_and_others_get_the_teachers(
    begun: bool, prior: bool
) -> None:
    start = a_start() if begun else None
    m = build(PSEUDO | {"prior": prior}, start)
    params, began, data = noisy(doubles(m)), doubles(m, 2), mixed_batch()
    logits = m.f(in_double(start) if start else began, data.x)
    if prior:
        logits = logits + log_prior(logits[:15:2], torch.ones(8, dtype=EXACT), 0.03)
    y = torch.where(data.labeled > 0, data.y, logits.argmax(1))[:15]
    wanted = cross_entropy(m.f(params, data.x[:15]), y)
    assert float(m.loss(params, data, began)) == pytest.approx(float(wanted), rel=1e-10)


def test_a_teacher_that_is_unsure_teaches_nothing() -> None:
    m, plain = build(PSEUDO | {"threshold": 1.0}), build({"name": "fedavg"})
    params, data = noisy(doubles(m)), mixed_batch()
    calm = {n: 0.1 * w for n, w in doubles(m, 2).items()}  # its logits are nearly 0
    assert torch.equal(m.loss(params, data, calm), plain.loss(params, data, calm))
    half = build(PSEUDO | {"threshold": 0.5})
    logits = half.f(doubles(m, 2), data.x)
    sure = (logits.softmax(1).amax(1) >= 0.5) & (data.present > data.labeled)
    assert 0 < int(sure.sum()) < 8
    y = torch.where(data.labeled > 0, data.y, logits.argmax(1))
    used = sure | (data.labeled > 0)
    wanted = cross_entropy(m.f(params, data.x[used]), y[used])
    assert float(half.loss(params, data, doubles(m, 2))) == pytest.approx(float(wanted), rel=1e-10)


def test_a_teacher_is_not_taught_by_its_own_labels() -> None:
    """No gradient flows into pseudo-labels or class shares."""
    m = build(PSEUDO | {"prior": True})
    params, data = noisy(doubles(m)), mixed_batch()
    through = grad(lambda p: m.loss(params, data, p))(params)
    assert all((g == 0).all() for g in through.values())


def test_an_unlabeled_client_teaches_by_pseudo_labels_and_says_so() -> None:
    m = build(PSEUDO)
    params, data = noisy(doubles(m)), batch(client(0, 20, labeled=False))
    assert m.learns_unlabeled
    assert max(float(g.abs().max()) for g in grad(m.loss)(params, data, params).values()) > 0
