"""Calibration: what was planted is found, and what it promises is what engines then give."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from small import METHODS, SPEC, STREAM, client, engine, method
from test_methods import batch, doubles
from torch import Tensor
from torch.func import grad

from flowdup.calibration import (
    MOVES,
    ClientsHere,
    answer,
    calibrate,
    em_settings,
    fit_scale_and_bias,
    prior_settings,
    uncorrected,
)
from flowdup.client import ClientConfig
from flowdup.data import ClientData
from flowdup.evaluation import transductive_accuracy, transductive_logits
from flowdup.methods import MethodConfig, MethodContext
from flowdup.models import Weights
from flowdup.params import prefixed
from flowdup.prior import log_prior
from flowdup.random import Stream

EXACT = torch.float64
SHARES = ([0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3])


def sharp_logits(points: int, shares: Sequence[float], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that say for every point how probable its classes are, and labels drawn so."""
    draw, classes = Stream(seed), len(shares)
    noise = torch.from_numpy(draw.child("noise").uniform(points * classes)).to(EXACT)
    logits = 3 * noise.reshape(points, classes) + torch.tensor(shares, dtype=EXACT).log()
    below = (torch.from_numpy(draw.child("y").uniform(points)).to(EXACT) + 1) / 2
    return logits, (logits.softmax(1).cumsum(1) < below[:, None]).sum(1).clamp(max=classes - 1)


def test_a_planted_scale_and_bias_are_found() -> None:
    logits, y = sharp_logits(5000, [0.25] * 4)
    bias = torch.tensor([0.8, -0.3, -0.7, 0.2], dtype=EXACT)
    scale, found = fit_scale_and_bias((logits - bias) / 2.5, y)
    assert float(scale) == pytest.approx(2.5, rel=0.05)
    assert (found - found.mean()).tolist() == pytest.approx(bias.tolist(), abs=0.1)


def test_a_fit_is_what_is_kept() -> None:
    logits, y = sharp_logits(300, [0.6, 0.3, 0.1])
    scale, bias = fit_scale_and_bias(3 * logits + 1, y)
    rows = (3 * logits + 1)[:100], (3 * logits + 1)[100:]
    found = calibrate({1.0: rows}, [y[:100], y[100:]]).correction
    assert float(found["scale"]) == pytest.approx(float(scale))
    assert found["bias"].tolist() == pytest.approx(bias.tolist(), abs=1e-6)
    assert bias.abs().max() > 0.01


def test_logits_that_are_right_stay_as_they_are() -> None:
    scale, bias = fit_scale_and_bias(*sharp_logits(5000, [0.25] * 4))
    assert float(scale) == pytest.approx(1, rel=0.05)
    assert bias.abs().max() < 0.1


def test_a_class_that_no_client_has_is_predicted_as_before() -> None:
    """What is fitted on clients that lack a class must not teach that there is none."""
    logits, y = sharp_logits(500, [0.3, 0.3, 0.2, 0.2])
    planted = torch.tensor([0.9, -0.5, 0.0, 0.0], dtype=EXACT)
    scale, bias = fit_scale_and_bias((logits - planted)[y < 2], y[y < 2])
    assert float(bias[0] - bias[1]) == pytest.approx(1.4, abs=0.3)
    assert bias[2:].tolist() == pytest.approx(2 * [float(bias[:2].mean())])
    for of in (2, 3):
        before, after = (rows.argmax(1) == of for rows in (logits, scale * logits + bias))
        assert after.sum() > 0.9 * before.sum() > 0


@pytest.mark.parametrize("clients", [[0, 0, 0], [1, 0, 1, 1]])
def test_one_class_or_two_of_many_say_nothing_of_the_others(clients: list[int]) -> None:
    y = torch.tensor(clients)
    _, bias = fit_scale_and_bias(torch.eye(5, dtype=EXACT)[y], y)
    assert bias[2:].tolist() == pytest.approx(3 * [float(bias[sorted({*clients})].mean())])


def test_a_few_points_that_are_all_right_do_not_make_models_sure_of_everything() -> None:
    y = torch.arange(30) % 3
    few, _ = fit_scale_and_bias(torch.eye(3, dtype=EXACT)[y], y)
    many, _ = fit_scale_and_bias(torch.eye(3, dtype=EXACT)[y.repeat(100)], y.repeat(100))
    assert 2 < float(few) < 6 < float(many) < 15


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("right", [True, False])
def test_logits_that_are_always_right_or_always_wrong_give_finite_numbers(
    size: float, right: bool
) -> None:
    y = torch.arange(40) % 4
    logits = size * torch.eye(4, dtype=EXACT)[y if right else (y + 1) % 4]
    found = calibrate({1.0: [logits]}, [y])
    assert all(torch.isfinite(t).all() for t in found.correction.values())
    assert not right or float(found.accuracies) == 100


def test_logits_that_are_not_finite_teach_nothing() -> None:
    logits, y = sharp_logits(60, [0.4, 0.3, 0.3])
    broken = torch.full((4, 3), math.nan, dtype=EXACT)
    broken[2:] = math.inf
    one = calibrate({1.0: [logits]}, [y])
    two = calibrate({1.0: [logits, broken]}, [y, torch.tensor([0, 1, 2, 1])])
    assert torch.equal(one.correction["scale"], two.correction["scale"])
    assert torch.equal(one.correction["bias"], two.correction["bias"])
    none = calibrate({1.0: [broken]}, [torch.tensor([0, 1, 2, 1])])
    assert float(none.correction["scale"]) == 1
    assert (none.correction["bias"] == 0).all()


def test_points_and_clients_without_labels_change_no_fit_but_points_count_for_shares() -> None:
    logits, y = sharp_logits(40, [0.7, 0.2, 0.1])
    stranger, _ = sharp_logits(9, [0.1, 0.1, 0.8], seed=1)
    alone = calibrate({1.0: [logits]}, [y])
    both = calibrate({1.0: [stranger, logits]}, [torch.full((9,), -1), y])
    assert all(torch.equal(alone.correction[n], both.correction[n]) for n in alone.correction)
    assert torch.equal(alone.accuracies, both.accuracies)
    partly = calibrate(
        {1.0: [torch.cat([logits, stranger])]}, [torch.cat([y, torch.full((9,), -1)])]
    )
    assert torch.equal(alone.correction["bias"], partly.correction["bias"])


def test_clients_of_one_point_and_of_many_are_each_counted_once() -> None:
    logits, y = sharp_logits(31, [0.6, 0.4])
    found = calibrate({1.0: [logits[:1], logits[1:]]}, [y[:1], y[1:]])
    assert found.accuracies.shape == (2,)
    assert float(found.accuracies[0]) in (0, 100)
    share = float(found.accuracies[1]) * 30 / 100
    assert share == pytest.approx(round(share), abs=1e-9)


def test_a_prior_does_not_rule_out_what_is_rare_at_a_client() -> None:
    """Class shares that suit the points that they are found from best fail on others."""
    plain = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.08, 0.06, 0.03, 0.03], dtype=EXACT)
    logits, labels = [], []
    for seed in range(60):
        draw, power = Stream(seed), (0.2, 1.0, 3.0)[seed % 3]  # no client is a typical one
        shares = plain**power / (plain**power).sum()
        below = (torch.from_numpy(draw.child("y").uniform(24)).to(EXACT) + 1) / 2
        y = ((shares.cumsum(0) < below[:, None]).sum(1).clamp(max=7) + seed) % 8
        noise = torch.from_numpy(draw.child("noise").uniform(24 * 8)).to(EXACT).reshape(24, 8)
        logits.append(4 * torch.eye(8, dtype=EXACT)[y] + 3 * noise)
        labels.append(y)
    found = calibrate({1.0: logits}, labels).correction
    clients = ClientsHere({1.0: logits}, labels, torch.device("cpu"))
    names = "scale", "bias", "profile"
    grid = clients.grid(1.0, *(found[name].double() for name in names))
    names = "strength", "sparsity", "typical"
    chosen = torch.stack([found[name] for name in names])
    kept = int((torch.tensor(prior_settings(8)) - chosen).abs().sum(1).argmin())
    greedy = int(grid.accuracies.mean(1).argmax())
    assert grid.unseen[kept].mean() > grid.unseen[greedy].mean() + 0.5


def test_how_uneven_clients_are_is_learned_from_clients_with_labels() -> None:
    """Two classes a client, equally often: EM says which, and need not say how often."""
    logits, labels = [], []
    for seed in range(40):
        y = torch.tensor([seed, seed + 1 + seed % 7]).repeat(15) % 8
        noise = torch.from_numpy(Stream(seed).uniform(30 * 8)).to(EXACT).reshape(30, 8)
        logits.append(2 * torch.eye(8, dtype=EXACT)[y] + 3 * noise)
        labels.append(y)
    unlabeled = [*labels[:20], torch.full((5,), -1)]
    found = calibrate({1.0: [*logits[:20], logits[20][:5]]}, unlabeled).correction
    assert found["profile"].tolist() == pytest.approx([0.5, 0.5, 0, 0, 0, 0, 0, 0])
    assert float(found["typical"]) > 0
    settings = torch.tensor([[found["strength"], found["sparsity"]]], dtype=EXACT)
    x, y = torch.stack(logits[20:]) * found["scale"] + found["bias"], torch.stack(labels[20:])
    own, *_, usual = answer(
        x, torch.ones(y.shape, dtype=EXACT), settings, found["profile"].to(EXACT)
    )
    assert (usual == y).double().mean() > (own == y).double().mean() + 0.005


def test_among_equals_the_least_correction_is_taken() -> None:
    y = torch.arange(12) % 3
    sure = 30 * torch.eye(3, dtype=EXACT)[y]
    found = calibrate({move: [sure] for move in MOVES}, [y]).correction
    assert [float(found[n]) for n in ("move", "strength", "sparsity", "typical")] == [0, 0, 0, 0]


def test_among_equally_accurate_moves_the_one_with_the_least_loss_is_taken() -> None:
    y = torch.arange(12) % 3
    sure = torch.eye(3, dtype=EXACT)[y]
    doubts = sure + torch.eye(3, dtype=EXACT)[(y + 1) % 3] * 0.8
    found = calibrate({0.0: [doubts], 1.0: [sure]}, [y])
    assert float(found.correction["move"]) == 1
    assert found.loss < calibrate({0.0: [doubts]}, [y]).loss


def test_the_move_with_the_best_accuracy_is_taken() -> None:
    logits, y = sharp_logits(200, [0.4, 0.3, 0.3])
    better = logits + 3 * torch.eye(3, dtype=EXACT)[y]
    found = calibrate({0.0: [logits], 0.5: [better], 1.0: [logits]}, [y])
    assert float(found.correction["move"]) == 0.5
    assert found.accuracies.mean() > calibrate({0.0: [logits]}, [y]).accuracies.mean()


def hidden_in_noise(number: int, points: int) -> ClientData:
    """A client whose images are mostly noise."""
    plain = client(number, points)
    draw = Stream(13).child("noise", number)
    noise = torch.from_numpy(draw.integers(plain.x.numel(), 256)).reshape(plain.x.shape)
    return replace(plain, x=(0.15 * plain.x + 0.85 * noise).to(torch.uint8))


def two_class_clients() -> list[ClientData]:
    """Each with two of four classes, of different sizes; some labels are missing."""
    found = []
    for number, points in enumerate((40, 25, 31, 1, 18, 12)):
        whole = hidden_in_noise(4 * number, 160)
        assert whole.y is not None
        rows = torch.isin(whole.y, torch.tensor([number % 4, (number + 1) % 4])).nonzero()[:, 0]
        y = whole.y[rows[:points]].clone()
        y[: points // 5] = -1
        found.append(ClientData(whole.x[rows[:points]], y, str(number)))
    return [*found, client(90, 15, labeled=False)]


@cache
def weak_model() -> Weights:
    """FedAvg's, which is often wrong."""
    m, data = method("fedavg", EXACT), batch(hidden_in_noise(80, 300), 300)
    theta = doubles(m)
    for _ in range(20):
        slope = grad(m.loss)(theta, data, theta)
        theta = {n: w - 0.03 * slope[n] for n, w in theta.items()}
    return {n: w.float() for n, w in theta.items()}


@pytest.mark.parametrize("name", ["flowdup-corrected", "flowdup-plus"])
@pytest.mark.parametrize("kind", ["sequential", "batched"])
def test_the_accuracy_that_is_promised_is_the_one_that_engines_give(name: str, kind: str) -> None:
    context = MethodContext("cnn-small", SPEC, STREAM, "cpu", EXACT, start=weak_model())
    m = MethodConfig.from_table(METHODS[name]).build(context)
    psi, clients = doubles(m), two_class_clients()
    runner = engine(kind, m, "float64", ClientConfig(), clients)
    labeled = [c for c in clients if c.labeled]
    logits = {}
    for move in MOVES:
        plain = {n: t.to(EXACT) for n, t in uncorrected(SPEC.classes, move).items()}
        logits[move] = transductive_logits(runner, psi | prefixed("correction.", plain), labeled)
    found = calibrate(logits, [c.y for c in labeled if c.y is not None])
    correction = {n: t.to(EXACT) for n, t in found.correction.items()}
    assert correction["strength"] > 0
    given = transductive_accuracy(runner, psi | prefixed("correction.", correction), clients)
    assert given.mean == pytest.approx(float(found.accuracies.mean()), abs=1e-9)
    without = {n: t.to(EXACT) for n, t in uncorrected(SPEC.classes).items()}
    before = transductive_accuracy(runner, psi | prefixed("correction.", without), clients)
    assert before.mean is not None
    assert given.mean is not None
    assert given.mean > before.mean


def test_settings_of_the_prior_are_tried_at_once_as_one_by_one() -> None:
    clients = [sharp_logits(40, shares, seed)[0] for seed, shares in enumerate(SHARES)]
    logits = torch.stack(clients)
    present = torch.ones(logits.shape[:2], dtype=EXACT)
    present[1, 25:] = 0
    settings = torch.tensor(em_settings(3), dtype=EXACT)
    profile = torch.tensor([0.5, 0.4, 0.1], dtype=EXACT)
    alone = torch.cat([answer(logits, present, one[None], profile) for one in settings])
    assert torch.equal(answer(logits, present, settings, profile), alone)
    wanted = [
        (logits + log_prior(logits, present, sparsity, strength, typical, profile)[:, None])
        for strength, sparsity, typical in prior_settings(3)
    ]
    assert torch.equal(alone, torch.stack(wanted).argmax(-1))
    assert len({tuple(own.flatten().tolist()) for own in alone}) > 3  # settings matter
