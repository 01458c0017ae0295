"""FLowDUP+, logit adjustment and pseudo-labels, each written out in plain torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from small import METHODS, SPEC, STREAM, client, engine, first_task, method
from test_methods import batch, doubles, noisy
from torch import Tensor
from torch.func import grad
from torch.nn.functional import cross_entropy

from flowdup.aggregation import total
from flowdup.client import ClientConfig
from flowdup.data import ClientData
from flowdup.errors import ConfigError, FlowdupError
from flowdup.hypernetwork import HypernetworkConfig
from flowdup.methods import METHODS as ALL
from flowdup.methods import Batch, Deployed, Method, MethodConfig, MethodContext, Params
from flowdup.methods.base import log_label_shares
from flowdup.models import Weights
from flowdup.params import prefixed, strip_prefix
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


def shares(y: Tensor, classes: int = 4) -> Tensor:
    """How often classes occur at a client, by points that all have labels."""
    counts = [y.tolist().count(c) for c in range(classes)]
    missed = counts.count(1) / len(y)
    rows = [(1 - missed) * n / len(y) + missed / classes for n in counts]
    return torch.tensor(rows, dtype=EXACT).clamp(min=1e-4)


def adjusted(logits: Tensor, y: Tensor, share: float) -> Tensor:
    """Of points that all have labels."""
    known = logits + shares(y).log()
    return (1 - share) * cross_entropy(logits, y) + share * cross_entropy(known, y)


# FLowDUP+


def plus_written_out(m: Any, params: Params, data: Batch, table: dict[str, Any]) -> Tensor:
    """The objective on a full and labeled batch of 20."""
    x, y = data.x, data.y
    makes, scored = (slice(10), slice(10, 20)) if table["split_batch"] else (slice(20), slice(20))
    z = m.h.h1(strip_prefix(params, "h1."), x[makes])
    r = torch.cat([z.mean(0), z.std(0, correction=0)])
    r = (r - r.mean()) / (r.var(correction=0) + 1e-5).sqrt()
    hidden = (params["h2.hidden.weight"] @ r + params["h2.hidden.bias"]).relu()
    v = params["h2.output.weight"] @ hidden + params["h2.output.bias"]
    theta = m.subspace(v)
    if table["train_theta"]:  # theta_0 gives way to theta
        theta = {n: w - t for (n, w), t in zip(theta.items(), at_zero(m).values(), strict=True)}
        theta = {n: w + params[f"theta.{n}"] for n, w in theta.items()}
    logits = m.f(theta, x[scored])
    if table["prior"]:
        logits = logits + shares(y).log()
    loss = cross_entropy(logits, y[scored]) + 1e-2 * (v - params["psi_r"]).square().sum()
    if table["head"]:
        own = z @ params["head.weight"].T + params["head.bias"]
        loss = loss + table["head"] * cross_entropy(own, y[makes])
    if table["train_theta"]:
        for_all = adjusted(m.f(strip_prefix(params, "theta."), x), y, 0.5)
        loss = loss + table["global_loss"] * for_all
    return loss


def at_zero(m: Any) -> Weights:
    found: Weights = m.subspace(torch.zeros(m.k, dtype=EXACT))
    return found


@pytest.mark.parametrize("prior", [True, False])
@pytest.mark.parametrize("head", [0.3, 0.0])
@pytest.mark.parametrize("train_theta", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_the_objective_of_flowdup_plus_is_its_docstring_written_out(
    prior: bool, head: float, train_theta: bool, split: bool
) -> None:
    settings = {"head": head, "train_theta": train_theta, "prior": prior, "split_batch": split}
    table = PLUS | settings
    m = build(table, a_start())
    params, began, data = noisy(doubles(m)), doubles(m, 2), batch(client(0, 20))
    found = m.loss(params, data, began)
    wanted = plus_written_out(m, params, data, table)
    assert float(found) == pytest.approx(float(wanted), rel=1e-10)


def test_theta_learns_by_the_personal_loss_and_by_its_own() -> None:
    def gradient(**settings: Any) -> Params:
        m = build(PLUS | {"adjusted": 0.0} | settings, a_start())
        return grad(m.loss)(noisy(doubles(m)), data, doubles(m, 2))

    data = batch(client(0, 20))
    both, personal = gradient(global_loss=0.5), gradient(global_loss=0.0)
    theta = strip_prefix(noisy(doubles(build(PLUS, a_start()))), "theta.")
    own = grad(method("fedavg", EXACT).loss)(theta, data, theta)
    for n, g in own.items():
        assert personal[f"theta.{n}"].abs().max() > 0
        assert torch.allclose(both[f"theta.{n}"], personal[f"theta.{n}"] + 0.5 * g, atol=1e-13)
    others = [n for n in both if not n.startswith("theta.")]
    assert all(torch.equal(both[n], personal[n]) for n in others)


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
    if kind == "flowdup" or METHODS[name].get("train_theta") is False:
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
    own = {n: e.method for n, e in ALL.items() if e.method.__module__.startswith("flowdup.")}
    assert {n for n, m in own.items() if m.interpolates} == {"flowdup", "flowdup-plus"}


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
def test_fedavg_la_adds_the_clients_label_shares(share: float) -> None:
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


def shares_in(y: list[int], classes: int) -> Tensor:
    """What a batch with these labels says of its client's label shares, -1: none."""
    labels = torch.tensor(y)
    labeled = (labels >= 0).to(EXACT)
    data = Batch(torch.zeros(len(y), 1), labels.clamp(min=0), torch.ones_like(labeled), labeled)
    return log_label_shares(data, torch.zeros(len(y), classes, dtype=EXACT)).exp()


def test_classes_that_a_batch_lacks_are_not_ruled_out_where_many_labels_are_alone() -> None:
    few = shares_in([0, 1] * 10, 62)
    assert torch.allclose(few[2:], few.new_tensor(1e-4))
    many = shares_in([*range(14), *range(6)], 62)  # eight of 20 are alone
    assert many[-1] == pytest.approx(0.4 / 62)
    assert many[0] == pytest.approx(0.6 * 2 / 20 + 0.4 / 62)
    assert many.sum() == pytest.approx(1)
    for labels in ([3, -1, -1], [-1, -1, -1]):
        assert len(set(shares_in(labels, 4).tolist())) == 1  # nothing is known


# Pseudo-labels

PSEUDO: dict[str, Any] = {"name": "fedavg-pseudo"}


def pseudo(start: Weights | None = None, **teacher: Any) -> Method:
    return build(PSEUDO | {"teacher": {"prior": False, "threshold": 0.0} | teacher}, start)


def sent(weights: Weights) -> Params:
    """What a client gets of a teacher with these weights."""
    return {f"teacher.{n}": w.to(EXACT) for n, w in weights.items()}


def latest(m: Method, model: Weights) -> Deployed:
    """A round's end that left this model for everyone."""
    return Deployed(m, model | prefixed("theta.", model))


def half_labeled() -> tuple[Tensor, Tensor, Tensor]:
    """20 points: the last five are padding, and of the others every second has a label."""
    data, rows = batch(client(0, 20)), torch.arange(20)
    return data.x, torch.where(rows % 2 == 1, data.y, -1), (rows < 15).to(EXACT)


@pytest.mark.parametrize("prior", [True, False])
def test_a_point_with_a_label_keeps_it_and_others_get_the_teachers(prior: bool) -> None:
    m, (x, y, present) = pseudo(prior=prior), half_labeled()
    logits = m.f(in_double(a_start(1)), x)
    if prior:
        logits = logits + log_prior(logits[:15:2], torch.ones(8, dtype=EXACT), 0.03)
    found = m.labels(sent(a_start(1)), x, y, present)[:15]
    assert found[1::2].tolist() == y[1:15:2].tolist()
    assert found[::2].tolist() == logits.argmax(1)[:15:2].tolist()
    assert len(set(found[::2].tolist())) > 1


def test_a_teacher_that_is_unsure_gives_no_label() -> None:
    x, y, present = half_labeled()
    probability = pseudo().f(in_double(a_start()), x).softmax(1).amax(1)
    middle = float(probability[::2].median())
    found = pseudo(threshold=middle).labels(sent(a_start()), x, y, present)
    assert (found[::2] >= 0).tolist() == (probability[::2] >= middle).tolist()


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("prior", [True, False])
def test_a_teacher_that_knows_nothing_yet_gives_no_label(threshold: float, prior: bool) -> None:
    x, y, present = half_labeled()
    nothing = {n: torch.zeros_like(w) for n, w in a_start().items()}
    m = pseudo(threshold=threshold, prior=prior)
    assert torch.equal(m.labels(sent(nothing), x, y, present), y)


def test_pseudo_labels_without_anyone_to_give_them_are_refused() -> None:
    alone = PLUS | {"train_theta": False, "pseudo_labels": True}
    with pytest.raises(
        ConfigError, match=r"pseudo_labels needs a teacher.* give one in \[\[before"
    ):
        build(alone)
    assert build(alone, a_start()).relabels
    assert build(alone | {"personal_teacher": True}).relabels
    with pytest.raises(ConfigError, match=r"personal_teacher says .* set both, or neither"):
        build(PLUS | {"pseudo_labels": False, "personal_teacher": True})


@pytest.mark.parametrize("table", [PSEUDO, PLUS])
def test_the_teacher_is_the_latest_model_for_everyone_after_the_warm_up(
    table: dict[str, Any],
) -> None:
    models = [a_start(seed) for seed in (1, 2, 3)]
    m = build(table | {"teacher": {"warm_up": 2}})
    state, taught = m.server_state(), []
    for model in models:
        taught.append(max(float(t.abs().max()) for n, t in state.items() if n in m.broadcast))
        state = m.update_server_state(state, torch.zeros(()), latest(m, model))
    assert taught == [0, 0, 0]
    assert all(torch.equal(state[n], t) for n, t in prefixed("teacher.", models[2]).items())
    assert set(m.broadcast) == {f"teacher.{n}" for n in m.f.shapes}


@pytest.mark.parametrize("table", [PSEUDO, PLUS])
def test_a_teacher_begins_as_the_model_that_the_stage_begins_from(table: dict[str, Any]) -> None:
    m = build(table, a_start())
    state = m.server_state()
    assert all(torch.equal(state[n], t) for n, t in sent(a_start()).items())
    other = m.update_server_state(state, torch.zeros(()), latest(m, a_start(6)))
    assert all(torch.equal(other[n].to(EXACT), t) for n, t in sent(a_start(6)).items())
    fixed = build(PLUS | {"train_theta": False}, a_start())
    assert fixed.update_server_state(state, torch.zeros(()), latest(fixed, a_start(6))) is state


PERSONAL = PLUS | {"personal_teacher": True}
PERSONALS = [PERSONAL, PERSONAL | {"train_theta": False}]


@pytest.mark.parametrize("table", PERSONALS)
def test_a_personal_teacher_is_what_psi_makes_of_the_clients_own_points(
    table: dict[str, Any],
) -> None:
    m = build(table)
    (x, y, present), others = half_labeled(), client(3, 20).x
    psi = noisy(doubles(m))
    psi["h2.output.weight"] *= 100  # clients differ little at first
    own, foreign = (
        m.f(m.personalize(psi, points, present), x).softmax(1).amax(1)[:15:2]
        for points in (x, others)
    )
    middle = float(own.median())
    m = build(table | {"teacher": {"prior": False, "threshold": middle}})
    found = m.labels(sent(psi), x, y, present)[:15]
    assert found[1::2].tolist() == y[1:15:2].tolist()
    assert (found[::2] >= 0).tolist() == (own >= middle).tolist()
    assert (found[::2] >= 0).tolist() != (foreign >= middle).tolist()


@pytest.mark.parametrize("table", PERSONALS)
def test_a_personal_teacher_follows_psi_after_the_warm_up(table: dict[str, Any]) -> None:
    m = build(table | {"teacher": {"warm_up": 1, "threshold": 0.0}})
    state, (x, y, present) = m.server_state(), half_labeled()
    psi = m.init(Stream(3))
    assert set(m.broadcast) == {f"teacher.{n}" for n in psi}
    for round in (1, 2):
        assert torch.equal(m.labels(in_double(state), x, y, present), y), round
        after = Deployed(m, psi | {"correction.scale": torch.ones(())})
        state = m.update_server_state(state, torch.zeros(()), after)
    assert all(torch.equal(state[f"teacher.{n}"], p) for n, p in psi.items())
    assert not torch.equal(m.labels(in_double(state), x, y, present), y)


@pytest.mark.parametrize("table", PERSONALS)
def test_a_personal_teacher_begins_as_the_model_that_the_stage_begins_from(
    table: dict[str, Any],
) -> None:
    m, (x, y, present) = build(table, a_start()), half_labeled()
    plain = build(PLUS, a_start())
    found, expected = (t.labels(in_double(t.server_state()), x, y, present) for t in (m, plain))
    assert torch.equal(found, expected)
    assert not torch.equal(found, y)


def test_without_pseudo_labels_nothing_more_is_sent() -> None:
    m = build(PLUS | {"pseudo_labels": False}, a_start())
    assert not m.relabels
    assert m.broadcast == ()
    assert m.server_state() == {}


@pytest.mark.parametrize("table", [PSEUDO, PLUS, PERSONAL])
@pytest.mark.parametrize("kind", ["sequential", "batched"])
def test_an_unlabeled_client_trains_as_if_the_teachers_labels_were_its_own(
    table: dict[str, Any], kind: str
) -> None:
    m = build(table | {"correction": "none", "teacher": {"threshold": 0.2}}, a_start(1))
    psi, config = noisy(doubles(m)), ClientConfig(1, 10, shift=3)
    task, x = first_task(m, psi), client(0, 23).x
    learned = {n: t for n, t in noisy(task.broadcast).items() if ".h1." in n or ".h2." in n}
    task = replace(task, broadcast=task.broadcast | learned)
    y = m.labels(task.broadcast, x, torch.full((23,), -1), torch.ones(23, dtype=EXACT))
    assert len(set(y.tolist())) > 1
    without, taught = (
        total(engine(kind, m, "float64", config, [c]).train(task)).delta
        for c in (ClientData(x), ClientData(x, y))
    )
    assert all(torch.allclose(without[n], taught[n], atol=1e-14) for n in psi)
    assert max(float(d.abs().max()) for d in taught.values()) > 1e-6


def test_a_clients_own_data_stays_without_labels() -> None:
    m = build(PSEUDO | {"teacher": {"threshold": 0.2}}, a_start())
    alone = ClientData(client(0, 23).x, torch.full((23,), -1))
    for kind in ("sequential", "batched"):
        list(engine(kind, m, "float64", ClientConfig(), [alone]).train(first_task(m, doubles(m))))
        assert alone.y is not None
        assert (alone.y == -1).all()
