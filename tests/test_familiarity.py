"""Foreign clients are told from those like training clients, at the stated rate."""

import pytest
import torch
from torch import Tensor

from flowdup.errors import ConfigError
from flowdup.familiarity import Familiarity, fit_familiarity

WIDTH = 20


def clients(count: int, seed: int, shift: float = 0.0, points: int = 40) -> list[Tensor]:
    """Sets of points around a centre of the client's own, which varies in three directions."""
    draw = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(WIDTH, 3, generator=torch.Generator().manual_seed(0)))[0]
    centres = torch.randn(count, 3, generator=draw) @ axes.T * 3
    away = torch.zeros(WIDTH).index_fill_(0, torch.tensor([5]), shift)
    return [c + away + torch.randn(points, WIDTH, generator=draw) for c in centres]


def mean(x: Tensor) -> Tensor:
    return x.mean(0)


@pytest.fixture(scope="module")
def fitted() -> Familiarity:
    return fit_familiarity(clients(300, 1), clients(199, 2), mean, rate=0.1)


@pytest.mark.parametrize("points", [1, 2, 7, 40, 400])
def test_clients_like_those_of_training_are_foreign_at_the_stated_rate(
    fitted: Familiarity, points: int
) -> None:
    new = clients(1000, 3, points=points)
    alarms = sum(fitted.score(mean(x)) > fitted.limit(points) for x in new) / 1000
    assert alarms < 0.1 + 0.05  # the limit itself varies by 0.02, and so does this share
    if points in (1, 40):  # sizes with a limit of their own
        assert alarms > 0.1 - 0.05


def test_foreign_clients_are_seen_the_better_the_more_points_they_have(
    fitted: Familiarity,
) -> None:
    seen = [
        sum(fitted.score(mean(x)) > fitted.limit(n) for x in clients(200, 4, 1.5, n)) / 200
        for n in (1, 10, 40)
    ]
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_the_summary_is_small_and_no_client_is_in_it(fitted: Familiarity) -> None:
    assert fitted.directions.shape == (8, WIDTH)
    assert sorted(fitted.limits) == [1, 3, 10, 30, 40]
    assert torch.allclose(fitted.directions @ fitted.directions.T, torch.eye(8), atol=1e-5)


def test_too_few_clients_for_a_rate_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes 10 training clients and 19 validation clients"):
        fit_familiarity(clients(30, 1), clients(18, 2), mean)
