"""The baselines and rivals of FLowDUP, each against what its source says."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from small import SPEC, STREAM, client, engine, first_task, method, population
from test_methods import batch, batches, doubles, noisy
from torch import Tensor, nn
from torch.func import grad

from flowdup.client import ClientConfig, ClientUpdate
from flowdup.config import Config, load_config, read_config
from flowdup.cost import measure
from flowdup.data import ClientData, InputSpec
from flowdup.errors import ConfigError
from flowdup.methods import (
    METHODS,
    Deployed,
    Method,
    MethodConfig,
    MethodContext,
    Params,
    summary,
)
from flowdup.models import register_model
from flowdup.optimizers import OptimizerConfig
from flowdup.random import Stream
from flowdup.run import evaluate_run, train_run
from flowdup.server import ServerConfig, initial_state, train

CIFAR10 = InputSpec((3, 32, 32), "uint8", 10)


def build(table: dict[str, object], spec: InputSpec = CIFAR10, model: str = "cnn") -> Method:
    return MethodConfig.from_table(table).build(MethodContext(model, spec, STREAM))


def rounds(m: Method, kind: str, number: int) -> Params:
    config = ClientConfig(1, 10, 1.0, OptimizerConfig("sgd", 0.05))
    server = ServerConfig(number, 5, optimizer=OptimizerConfig("adam", 1e-3))
    state = initial_state(server, m, STREAM, torch.device("cpu"), torch.float32)
    *_, last = train(server, m, engine(kind, m, "float32", config), state, STREAM)
    return last.state.psi


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_in_one_line_what_it_is(name: str) -> None:
    assert 10 < len(summary(name)) < 90


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_digits_and_personalizes_strangers(name: str, tmp_path: Path) -> None:
    settings = {
        "flowdup": ["method.subspace.k=500", "method.hypernetwork.hidden=20"],
        "flowdup-plus": ["method.subspace.k=500", "method.hypernetwork.hidden=20"],
        "ld-fedavg": ["method.subspace.k=2000"],
        "pefll": ["method.hypernetwork.hidden=20"],
        "odpfl-hn": ["method.hypernetwork.hidden=20"],
        "arm-cml": ["method.hidden=8"],
    }
    config = load_config(
        "digits",
        [
            "data.train_clients=100",
            "data.validation_clients=50",
            "data.test_clients=10",
            "data.rotations=[0]",
            f"method.name={name}",
            *settings.get(name, []),
            "client.optimizer.lr=0.1",
            "client.clip=1.0",
            "server.rounds=60",
            "server.cohort=10",
            "server.lr_decay_fraction=0.0",
            "server.optimizer.lr=0.005",
            *(["method.batch_size=40"] if name == "fedtta" else []),
        ],
    )
    metrics = list(train_run(config, tmp_path))
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    result = evaluate_run(tmp_path)
    assert result["metrics"]["transductive"]["accuracy"]["mean"] > 30  # ten classes
    assert result["metrics"]["held_out"]["accuracy"]["mean"] > 30
    assert result["cost"]["parameters"] > 0


# FedProx


@pytest.mark.parametrize("kind", ["sequential", "batched"])
def test_fedprox_without_mu_is_fedavg_bit_for_bit(kind: str) -> None:
    prox = build({"name": "fedprox", "mu": 0.0, "adaptive": False}, SPEC, "cnn-small")
    a, b = rounds(prox, kind, 4), rounds(method("fedavg"), kind, 4)
    assert all(torch.equal(a[n], b[n]) for n in b) and a.keys() == b.keys()
    other = build({"name": "fedprox", "mu": 1.0, "adaptive": False}, SPEC, "cnn-small")
    c = rounds(other, kind, 4)
    assert any(not torch.equal(c[n], b[n]) for n in b)


def test_the_proximal_term_pulls_towards_where_the_round_began() -> None:
    m, plain = method("fedprox", torch.float64), method("fedavg", torch.float64)
    start, data = noisy(doubles(m)), batch(client(0, 20))
    params = {n: p + 0.1 for n, p in start.items()}
    pulled = grad(m.loss)(params, data, start | {"mu": torch.tensor(0.7).double()})
    free = grad(plain.loss)(params, data, start)
    assert all(torch.allclose(pulled[n] - free[n], torch.tensor(0.07).double()) for n in params)


@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0]), max_size=60),
    st.integers(1, 3),
    st.sampled_from([0.0, 1.0]),
)
@example([float(loss) for loss in range(14, 0, -1)], 1, 1.0)  # falls in a row, and it shrinks
@example([float(loss) for loss in (*range(9, 0, -1), 5, *range(4, -5, -1))], 1, 1.0)
@example([float(loss) for loss in range(30, 0, -1)], 2, 0.0)
def test_mu_follows_the_rule(losses: list[float], period: int, mu: float) -> None:
    m = build({"name": "fedprox", "mu": mu, "period": period}, SPEC, "mlp")
    state, expected, falls, before = m.server_state(), mu, 0, math.nan
    for i, loss in enumerate(losses, 1):
        state = m.update_server_state(state, torch.tensor(loss), Deployed(m, {}))
        if i % period == 0:
            mean = sum(losses[i - period : i]) / period
            falls = falls + 1 if mean < before - 1e-6 else 0
            if mean > before + 1e-6:
                expected += 0.1
            elif falls >= 5:
                expected = max(0.0, expected - 0.1)
            before = mean
        assert float(state["mu"]) == pytest.approx(expected, abs=1e-5)


def test_mu_stands_in_the_metrics_and_survives_a_restart(tmp_path: Path) -> None:
    table = {
        "model": "mlp",
        "method": {"name": "fedprox", "period": 1},
        "client": {"batch_size": 10, "optimizer": {"lr": 0.5}},
        "server": {"rounds": 12, "cohort": 3, "optimizer": {"name": "sgd", "lr": 1.0}},
        "run": {"checkpoint_every": 1},
    }
    config = read_config(table)
    whole = [m["mu"] for m in train_run(config, tmp_path / "whole", population=population())]
    assert whole[:2] == [1.0, 1.0] and len(set(whole)) > 2  # there is nothing to compare at first
    broken = train_run(config, tmp_path / "broken", population=population())
    first = [next(broken)["mu"] for _ in range(5)]
    broken.close()
    rest = train_run(config, tmp_path / "broken", resume=True, population=population())
    assert first + [m["mu"] for m in rest] == whole


# FedTTA


def test_fedtta_is_the_source_written_out_with_autograd() -> None:
    m = method("fedtta", torch.float64)
    params, data = noisy(doubles(m)), batch(client(0, 20))
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    theta = {n[6:]: p for n, p in leaves.items() if n.startswith("theta.")}
    hidden = m.f(theta, data.x)
    for layer in (0, 2, 4):
        hidden = (hidden @ leaves[f"phi.{layer}.weight"].T + leaves[f"phi.{layer}.bias"]).relu()
    learned = (hidden @ leaves["phi.6.weight"].T + leaves["phi.6.bias"]).norm()
    inner = torch.autograd.grad(learned, list(theta.values()), create_graph=True)
    adapted = {n: p - 0.1 * g for (n, p), g in zip(theta.items(), inner, strict=True)}
    outer = nn.functional.cross_entropy(m.f(adapted, data.x), data.y)
    expected = dict(zip(leaves, torch.autograd.grad(outer, list(leaves.values())), strict=True))
    found = grad(m.loss)(params, data, params)
    assert float(m.loss(params, data, params)) == pytest.approx(outer.item(), rel=1e-9)
    assert all(torch.allclose(found[n], expected[n], rtol=1e-7, atol=1e-10) for n in params)
    assert all(
        g.abs().max() > 0 for n, g in found.items() if n.startswith("phi.") and "weight" in n
    )


@pytest.mark.parametrize(("classes", "size"), [(10, 2497), (62, 4161)])
def test_the_adaptation_network_has_the_sources_size(classes: int, size: int) -> None:
    psi = build({"name": "fedtta"}, InputSpec((1, 28, 28), "uint8", classes)).init(Stream(0))
    assert sum(p.numel() for n, p in psi.items() if n.startswith("phi.")) == size


def test_a_stranger_takes_the_inner_step_averaged_over_its_batches() -> None:
    m = method("fedtta", torch.float64)
    params, x = noisy(doubles(m)), client(0, 20).x
    theta = {n[6:]: p for n, p in params.items() if n.startswith("theta.")}
    phi = {n[4:]: p for n, p in params.items() if n.startswith("phi.")}
    ones = torch.ones(10, dtype=torch.float64)

    def mean_norm(theta: Params) -> Tensor:
        norms = [m.learned_loss(theta, phi, part, ones) for part in (x[:10], x[10:])]  # type: ignore[attr-defined]
        return (norms[0] + norms[1]) / 2

    step = grad(mean_norm)(theta)
    found = m.personalize(params, x, torch.ones(20, dtype=torch.float64))
    assert all(torch.allclose(found[n], theta[n] - 0.1 * step[n], atol=1e-12) for n in theta)


def test_batches_of_strangers_are_those_of_training() -> None:
    m = build({"name": "fedtta"}, SPEC, "mlp")
    with pytest.raises(
        ConfigError, match=r"method\.batch_size = 50 must be client\.batch_size = 20"
    ):
        engine("batched", m, "float32", ClientConfig(batch_size=20))


# Tent and EM on the FedAvg model


class Normed(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        width = math.prod(shape)
        super().__init__(
            nn.Flatten(), nn.Linear(width, 8), nn.GroupNorm(2, 8), nn.Linear(8, outputs)
        )


register_model("normed-for-tests", Normed)


def entropy(m: Method, theta: Params, x: Tensor) -> float:
    p = m.f(theta, x).softmax(1)
    return float(-(p * p.log()).sum(1).mean())


@pytest.mark.parametrize(("model", "moved"), [("cnn-small", 8), ("normed-for-tests", 2)])
def test_tent_lowers_entropy_by_the_norms_or_by_all_weights(model: str, moved: int) -> None:
    m = build({"name": "fedavg-tent", "inner_lr": 0.01, "steps": 5, "chunk": 7}, SPEC, model)
    params, x = m.init(Stream(3)), client(0, 20).x
    theta = m.personalize(params, x, torch.ones(20))
    expected = {n: p.clone() for n, p in params.items()}
    for _ in range(5):
        leaves = {n: p.requires_grad_() for n, p in expected.items()}
        p = m.f(leaves, x).softmax(1)
        found = torch.autograd.grad(-(p * p.log()).sum(1).mean(), list(leaves.values()))
        moving = set(m.adapted)  # type: ignore[attr-defined]
        expected = {
            n: (w - 0.01 * g if n in moving else w).detach()
            for (n, w), g in zip(leaves.items(), found, strict=True)
        }
    assert all(torch.allclose(theta[n], expected[n], atol=1e-5) for n in theta)
    assert entropy(m, theta, x) < entropy(m, params, x)
    assert sum(not torch.equal(theta[n], params[n]) for n in params) == moved


def test_tent_refuses_norms_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"set method\.adapts to 'all'"):
        build({"name": "fedavg-tent", "adapts": "norms"}, SPEC, "mlp")


def test_em_finds_the_shares_of_the_classes_and_moves_the_output_bias_alone() -> None:
    m = build({"name": "fedavg-em"}, SPEC, "cnn-small")
    pi, q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.0, 0.7, 0.0, 0.3])
    draw = torch.from_numpy(Stream(5).child("noise").uniform(4 * 4000)).reshape(4000, 4)
    y = torch.multinomial(q, 4000, True, generator=torch.Generator().manual_seed(0))
    likelihood = 3 * nn.functional.one_hot(y, 4) + draw  # log p(x | y), up to a constant
    calibrated = torch.log_softmax(likelihood, 1) + pi.log()
    shift = m.prior_shift(calibrated, pi.log(), torch.ones(4000))  # type: ignore[attr-defined]
    assert torch.allclose((shift + pi.log()).exp(), q, atol=0.03)
    params = m.init(Stream(3))
    theta = m.personalize(params, client(0, 20).x, torch.ones(20))
    assert [n for n in theta if not torch.equal(theta[n], params[f"theta.{n}"])] == ["9.bias"]


def test_em_learns_how_often_classes_occur_and_leaves_theta_as_fedavg_has_it() -> None:
    m, plain = method("fedavg-em", torch.float64), method("fedavg", torch.float64)
    params, steps = doubles(m), batches(client(0, 40), 40)
    config = ClientConfig(clip=0.0, optimizer=OptimizerConfig("sgd", 0.1))
    theta = {n: params[f"theta.{n}"] for n in plain.f.shapes}
    mine, fedavg = (
        ClientUpdate(m, config)(first_task(m, params), steps),
        ClientUpdate(plain, config)(first_task(plain, theta), steps),
    )
    assert all(torch.equal(mine.delta[f"theta.{n}"], d) for n, d in fedavg.delta.items())


def test_em_learns_the_shares_of_rare_and_of_frequent_classes() -> None:
    shares = torch.tensor([25, 10, 4, 1]) / 40
    y = torch.arange(4).repeat_interleave((40 * shares).long())
    clients = [ClientData(client(i, 40).x, y) for i in range(3)]
    m = build({"name": "fedavg-em"}, SPEC, "mlp")
    config = ClientConfig(1, 20, 1.0, OptimizerConfig("sgd", 0.1))
    server = ServerConfig(200, 3, lr_decay_fraction=0.7, optimizer=OptimizerConfig("adam", 5e-3))
    state = initial_state(server, m, STREAM, torch.device("cpu"), torch.float32)
    runner = engine("batched", m, "float32", config, clients)
    *_, last = train(server, m, runner, state, STREAM)
    assert torch.allclose(last.state.psi["pi"], shares, atol=5e-3)


def test_em_refuses_a_model_without_an_output_bias() -> None:
    register_model("biasless-for-tests", _biasless)
    with pytest.raises(ConfigError, match="last layer has no bias"):
        build({"name": "fedavg-em"}, SPEC, "biasless-for-tests")


def _biasless(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs, bias=False))


# PeFLL, ODPFL-HN, and ablations of FLowDUP


@pytest.mark.parametrize("name", ["pefll", "odpfl-hn"])
def test_a_full_hypernetwork_emits_exactly_d_weights(name: str) -> None:
    m = build({"name": name})
    psi = m.init(Stream(0))
    theta = m.personalize(psi, torch.zeros(3, 3, 32, 32, dtype=torch.uint8), torch.ones(3))
    assert sum(w.numel() for w in theta.values()) == m.f.size == 156_810
    assert len(psi["h2.output.bias"]) == m.f.size
    e, w = psi["h2.hidden.weight"].shape[1], 100
    d_h1 = sum(p.numel() for n, p in psi.items() if n.startswith("h1."))
    counted = d_h1 + (e + 1) * w + 3 * (w + 1) * w + (w + 1) * m.f.size  # as documented
    assert sum(p.numel() for p in psi.values()) == counted
    assert e == {"pefll": 100, "odpfl-hn": 32}[name]


def test_every_client_of_ld_fedavg_gets_the_model_that_was_trained() -> None:
    m = method("ld-fedavg", torch.float64)
    params, data = noisy(doubles(m)), batch(client(0, 20))
    own = m.personalize(params, client(1, 5).x, torch.ones(5).double())
    losses = torch.nn.functional.cross_entropy(m.f(own, data.x), data.y)
    assert float(m.loss(params, data, params)) == pytest.approx(float(losses), rel=1e-12)


@pytest.mark.parametrize("name", ["pefll", "odpfl-hn"])
def test_pefll_makes_a_model_from_all_points_and_scores_the_labeled(name: str) -> None:
    m = method(name, torch.float64)
    params, data = noisy(doubles(m)), batch(client(0, 20))
    some = data._replace(labeled=data.labeled * (torch.arange(20) < 6))
    theta = m.personalize(params, data.x, data.present)
    wanted = torch.nn.functional.cross_entropy(m.f(theta, data.x[:6]), data.y[:6])
    assert float(m.loss(params, some, params)) == pytest.approx(float(wanted), rel=1e-10)


def test_psi_r_fixed_at_zero_is_not_learned_and_not_sent() -> None:
    m = method("flowdup-fixed", torch.float64)
    params, data = noisy(doubles(m)), batch(client(1, 20, labeled=False))
    first, _ = data.halves()
    v = m.h(params, first.x, first.present)  # type: ignore[attr-defined]
    assert "psi_r" not in params
    assert float(m.loss(params, data, params)) == pytest.approx(1e-2 * float(v @ v), rel=1e-12)


def test_settings_inside_a_method_keep_its_own_defaults() -> None:
    config = MethodConfig.from_table({"name": "odpfl-hn", "hypernetwork": {"hidden": 7}})
    h = config.settings.hypernetwork
    assert (h.embedding, h.hidden, h.layers, h.normalize) == (32, 7, 4, False)
    server = read_config({"server": {"optimizer": {"lr": 0.01}}}).server
    assert server.optimizer.name == Config().server.optimizer.name == "adam"


def test_costs_are_those_that_can_be_counted_by_hand() -> None:
    m = build({"name": "fedavg"})
    counted = measure(m, ClientConfig(batch_size=50), CIFAR10, m.init(Stream(0)), 100)
    forward = 2 * (28**2 * 32 * 75 + 10**2 * 64 * 800 + 1600 * 64 + 64 * 10)
    assert counted.predict_flops == forward
    assert counted.personalize_flops == 0
    # backward: every product twice more, except that nobody asks for the gradient of the images
    assert counted.train_flops == 100 * (3 * forward - 2 * 28**2 * 32 * 75)
    assert counted.bytes_up == counted.bytes_down == 4 * 156_810
    prox = build({"name": "fedprox"})
    assert (
        measure(prox, ClientConfig(), CIFAR10, prox.init(Stream(0)), 50).bytes_down == 4 * 156_811
    )


@pytest.mark.parametrize("name", ["flowdup", "pefll", "odpfl-hn"])
def test_the_bytes_of_an_update_are_those_of_psi_however_it_is_kept(name: str) -> None:
    """h2's matrices are kept as factors, which a real client would not send for a short round."""
    m = method(name)
    psi = m.init(Stream(0))
    counted = measure(m, ClientConfig(batch_size=10), SPEC, psi, 20)
    assert counted.bytes_up == counted.bytes_down == 4 * sum(p.numel() for p in psi.values())
