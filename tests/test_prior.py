"""Class shares by EM: against a version in plain Python, and on points whose shares are known."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from flowdup.prior import STEPS, log_prior, sparsity_for
from flowdup.random import Stream

EXACT = torch.float64


def gaussian_logits(shares: list[float], points: int, seed: int = 0) -> Tensor:
    """Exact log-likelihoods of points x ~ N(e_y, 1/4), y drawn in these shares to the point."""
    draw, classes = Stream(seed), len(shares)
    counts = [round(share * points) for share in shares]
    y = torch.repeat_interleave(torch.arange(classes), torch.tensor(counts))
    noise = torch.from_numpy(draw.uniform(12 * len(y) * classes)).to(EXACT)
    noise = noise.reshape(12, len(y), classes).sum(0) / 2  # 12 uniforms: nearly normal
    x = torch.eye(classes, dtype=EXACT)[y] + noise / 2
    return -2 * (x[:, None] - torch.eye(classes, dtype=EXACT)).square().sum(2)


def em_in_python(
    logits: list[list[float]],
    sparsity: float = 0.0,
    strength: float = 1.0,
    typical: float = 0.0,
    profile: Sequence[float] = (),
) -> list[float]:
    """strength log q, one point and one class at a time."""
    classes = len(logits[0])
    q = [1 / classes] * classes
    prior = [1.0] * classes  # the first E-step has none
    for _ in range(STEPS):
        mean = [0.0] * classes
        for row in logits:
            joint = [math.exp(a) * p**strength for a, p in zip(row, prior, strict=True)]
            mean = [m + j / sum(joint) / len(logits) for m, j in zip(mean, joint, strict=True)]
        kept = [max(m - sparsity, 1e-6) for m in mean]
        prior = q = [k / sum(kept) for k in kept]
    for usual, c in zip(profile, sorted(range(classes), key=lambda c: -mean[c]), strict=False):
        q[c] = q[c] ** (1 - typical) * max(usual, 1e-6) ** typical
    return [strength * math.log(share) for share in q]


PROFILE = (0.6, 0.4, 0.0, 0.0)


def test_of_classes_that_sparsity_removes_the_likeliest_has_the_profiles_next_share() -> None:
    logits = gaussian_logits([0.0, 0.05, 0.0, 0.25, 0.7], 40)
    profile = torch.tensor([0.6, 0.25, 0.15, 0.0, 0.0], dtype=EXACT)
    present = torch.ones(40, dtype=EXACT)
    assert log_prior(logits, present, 0.1).exp()[1] < 1e-5
    found = log_prior(logits, present, 0.1, 1.0, 1.0, profile).exp()
    assert found.tolist() == pytest.approx([1e-6, 0.15, 1e-6, 0.25, 0.6])


@pytest.mark.parametrize(
    ("sparsity", "strength", "typical"),
    [(0.0, 1.0, 0.0), (0.03, 1.0, 0.0), (0.05, 0.5, 0.0), (0.0, 1.0, 1.0), (0.03, 0.5, 0.4)],
)
def test_shares_are_those_of_em_in_plain_python(
    sparsity: float, strength: float, typical: float
) -> None:
    logits = gaussian_logits([0.1, 0.7, 0.0, 0.2], 30)
    prior = sparsity, strength, typical
    profile = torch.tensor(PROFILE, dtype=EXACT)
    found = log_prior(logits, torch.ones(30, dtype=EXACT), *prior, profile)
    assert found.tolist() == pytest.approx(em_in_python(logits.tolist(), *prior, PROFILE), rel=1e-9)


def test_a_typical_client_has_the_profiles_shares_and_its_own_classes() -> None:
    logits, profile = gaussian_logits([0.0, 0.6, 0.0, 0.4], 40), torch.tensor([0.5, 0.5, 0, 0])
    present = torch.ones(40, dtype=EXACT)
    found = log_prior(logits, present, 0.0, 1.0, 1.0, profile.to(EXACT)).exp()
    assert found.tolist() == pytest.approx([1e-6, 0.5, 1e-6, 0.5])
    assert log_prior(logits, present).exp()[1] > 0.55


def test_known_shares_are_found() -> None:
    shares = [0.6, 0.3, 0.1, 0.0]
    found = log_prior(gaussian_logits(shares, 4000), torch.ones(4000, dtype=EXACT)).exp()
    assert found.sum() == pytest.approx(1)
    assert found.tolist() == pytest.approx(shares, abs=0.03)


def test_sparsity_removes_classes_that_are_not_there_and_keeps_those_that_are() -> None:
    logits = gaussian_logits([0.5, 0.5, 0.0, 0.0], 40, seed=5)
    present = torch.ones(40, dtype=EXACT)
    loose, sparse = (log_prior(logits, present, s).exp() for s in (0.0, 0.05))
    assert loose[2:].max() > 0.05
    assert sparse[2:].max() < 1e-5
    assert sparse[:2].min() > 0.3


def test_the_largest_sparsity_leaves_equal_shares() -> None:
    found = log_prior(gaussian_logits([1.0, 0.0], 8), torch.ones(8, dtype=EXACT), 1.0)
    assert found.exp().tolist() == pytest.approx([0.5, 0.5])


def test_a_prior_without_strength_shifts_nothing() -> None:
    logits = gaussian_logits([0.9, 0.1], 20)
    assert (log_prior(logits, torch.ones(20, dtype=EXACT), 0.03, 0.0) == 0).all()


def test_points_that_are_absent_do_not_count() -> None:
    logits = gaussian_logits([0.6, 0.3, 0.1], 20)
    padded = torch.cat([logits, 50 * torch.eye(3, dtype=EXACT)[[2, 2, 2]]])
    present = torch.cat([torch.ones(20), torch.zeros(3)]).to(EXACT)
    found, wanted = log_prior(padded, present, 0.02), log_prior(logits, present[:20], 0.02)
    assert torch.allclose(found, wanted, rtol=1e-12)
    assert torch.isfinite(log_prior(padded, 0 * present)).all()


def test_the_order_of_points_does_not_matter() -> None:
    logits, present = gaussian_logits([0.6, 0.3, 0.1], 20), torch.ones(20, dtype=EXACT)
    mixed = torch.from_numpy(Stream(1).permutation(20))
    assert torch.allclose(log_prior(logits[mixed], present), log_prior(logits, present), rtol=1e-12)


def test_many_clients_at_once_are_each_alone() -> None:
    """Stacked or under vmap, with a sparsity that is a tensor."""
    shares = ([0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3])
    logits = torch.stack([gaussian_logits(s, 20, i) for i, s in enumerate(shares)])
    present = (torch.arange(20) < torch.tensor([[20], [11], [1]])).to(EXACT)
    sparsity = torch.tensor(0.02, dtype=EXACT)
    alone = torch.stack([log_prior(a, p, sparsity) for a, p in zip(logits, present, strict=True)])
    assert torch.allclose(log_prior(logits, present, sparsity), alone, rtol=1e-12)
    mapped = vmap(lambda a, p: log_prior(a, p, sparsity))(logits, present)
    assert torch.allclose(mapped, alone, rtol=1e-12)
    typical = sparsity, 0.8, 0.4, torch.tensor([0.7, 0.2, 0.1], dtype=EXACT)
    alone = torch.stack([log_prior(a, p, *typical) for a, p in zip(logits, present, strict=True)])
    assert torch.allclose(log_prior(logits, present, *typical), alone, rtol=1e-12)
    mapped = vmap(lambda a, p: log_prior(a, p, *typical))(logits, present)
    assert torch.allclose(mapped, alone, rtol=1e-12)


def test_a_constant_on_all_logits_of_a_point_changes_nothing_and_large_ones_stay_finite() -> None:
    logits, present = gaussian_logits([0.6, 0.3, 0.1], 20), torch.ones(20, dtype=EXACT)
    shifted = logits + torch.linspace(-500, 500, 20, dtype=EXACT)[:, None]
    assert torch.allclose(log_prior(shifted, present), log_prior(logits, present), rtol=1e-9)
    assert torch.isfinite(log_prior(1e30 * logits.float(), present.float())).all()


def test_with_more_classes_less_is_taken_off_each() -> None:
    assert [sparsity_for(c, 0.03) for c in (2, 10, 62)] == pytest.approx([0.03, 0.03, 0.3 / 62])
    # five classes with a share of 1/10 and 55 with 1/110, all of which look it
    counts = torch.tensor([11] * 5 + [1] * 55)
    logits = 20 * torch.eye(60, dtype=EXACT).repeat_interleave(counts, 0)
    everyone = torch.ones(110, dtype=EXACT)
    assert log_prior(logits, everyone, sparsity_for(60, 0.03)).exp().min() > 1e-3
    assert log_prior(logits, everyone, 0.03).exp().min() < 1e-4
