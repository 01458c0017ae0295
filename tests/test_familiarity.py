"""Foreign clients are told from those like training clients, at the stated rate."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowdup.errors import CheckpointError, ConfigError
from flowdup.familiarity import (
    FAMILIARITY,
    Familiarity,
    Verdict,
    _rank,
    fit_familiarity,
    read_familiarity,
    store_familiarity,
    stored_familiarity,
)

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
    assert alarms < 0.1 + 0.02  # the share varies by 0.01
    if points in (1, 40):  # sizes with a limit of their own
        assert alarms > 0.02


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


def test_the_rate_is_kept_in_19_of_20_draws_of_validation_clients() -> None:
    draw = torch.Generator().manual_seed(0)
    for count in (59, 100, 400):
        scores = torch.rand(2000, count, generator=draw).sort(1).values  # P(score > s) = 1 - s
        above = 1 - scores[:, _rank(count, 0.05) - 1]
        assert float((above > 0.05).float().mean()) < 0.05 + 0.015
        assert float(above.mean()) > 0.015
        if count > 59:  # one less would not do
            assert float((1 - scores[:, _rank(count, 0.05) - 2] > 0.05).float().mean()) > 0.05
    assert _rank(58, 0.05) == 58 and _rank(59, 0.05) == 59 and _rank(19, 0.05) == 19


def test_all_points_of_a_client_are_embedded_once() -> None:
    sizes: list[int] = []

    def counted(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return mean(x)

    fit_familiarity(clients(30, 1), clients(19, 2), counted)
    assert [sizes.count(size) for size in (1, 3, 10, 30, 40)] == [30 + 19] * 5


def test_too_few_clients_for_a_rate_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes 10 training clients and 19 validation clients"):
        fit_familiarity(clients(30, 1), clients(18, 2), mean)


def test_a_map_counts_training_clients_and_shows_none_that_is_alone() -> None:
    together = [torch.full((5, WIDTH), float(i // 20)) + torch.eye(5, WIDTH) for i in range(60)]
    alone = torch.zeros(5, WIDTH)
    alone[:, 0] = 1.7
    summary = fit_familiarity([*together, alone], clients(19, 2), mean)
    counts = [c for row in summary.map.counts for c in row]
    assert sorted(c for c in counts if c) == [20, 20, 20]
    assert summary.map.high[0] == pytest.approx(3 * float(summary.variances[0]) ** 0.5, rel=1e-6)


def test_rows_of_the_map_lie_along_the_second_direction(fitted: Familiarity) -> None:
    side = len(fitted.map.counts)
    assert {len(row) for row in fitted.map.counts} == {side}
    places = torch.stack([fitted.directions @ (mean(x) - fitted.mean) for x in clients(300, 1)])
    x, y = (
        ((places[:, i] / fitted.map.high[i] + 1) / 2 * side).long().clamp(0, side - 1)
        for i in (0, 1)
    )
    for j, row in enumerate(fitted.map.counts):
        for i, count in enumerate(row):
            there = int(((x == i) & (y == j)).sum())
            assert abs(count - (there if there >= 3 else 0)) <= 1 or {count, there} <= {0, 2, 3}


def test_clients_that_are_all_the_same_have_limits_above_zero() -> None:
    same = [torch.ones(4, WIDTH)] * 30
    fitted = fit_familiarity(same, same, mean)
    assert all(limit > 0 for limit in fitted.limits.values())
    assert not fitted.judge(torch.ones(WIDTH), 2).foreign
    assert fitted.judge(2 * torch.ones(WIDTH), 2).foreign


def test_embeddings_of_one_number_will_do() -> None:
    one = [x[:, :1] for x in clients(40, 1)]
    fitted = fit_familiarity(one, one, mean)
    assert fitted.directions.shape == (0, 1)
    assert not fitted.judge(fitted.mean, 10).foreign
    assert read_familiarity(fitted.table()).table() == fitted.table()


def test_a_few_small_clients_do_not_take_the_limits_of_many_points_away() -> None:
    ragged = [*clients(30, 2), *clients(5, 3, points=2)]
    assert sorted(fit_familiarity(clients(30, 1), ragged, mean).limits) == [1, 3, 10, 30, 40]


def test_unlike_training_clients_raise_a_limit_that_alike_ones_set() -> None:
    training = clients(50, 1)
    centre = torch.stack([mean(x) for x in training]).mean(0)
    limits = [
        fit_familiarity(training, validation, mean).limits[1]
        for validation in ([centre.repeat(4, 1)] * 30, clients(50, 4))
    ]
    assert limits[0] > 0.3 * limits[1]


def test_embeddings_that_are_not_finite_are_refused() -> None:
    broken = [*clients(20, 2), torch.full((4, WIDTH), torch.nan)]
    with pytest.raises(ConfigError, match="NaN or infinite"):
        fit_familiarity(clients(30, 1), broken, mean)
    with pytest.raises(ConfigError, match="has 2 dimensions"):
        fit_familiarity(clients(30, 1), clients(30, 2), lambda x: x[:1])
    fitted = fit_familiarity(clients(30, 1), clients(30, 2), mean)
    assert fitted.judge(torch.full((WIDTH,), torch.nan), 3) == Verdict(
        math.inf, fitted.limits[3], True, 0.05
    )


def test_what_is_stored_is_what_is_read(fitted: Familiarity, tmp_path: Path) -> None:
    store_familiarity(tmp_path, fitted, "psi")
    found = stored_familiarity(tmp_path, "psi")
    assert found is not None
    r = mean(clients(1, 9)[0])
    assert found.judge(r, 40) == fitted.judge(r, 40)
    assert found.table() == fitted.table()
    assert stored_familiarity(tmp_path, "another psi") is None
    assert stored_familiarity(tmp_path / "elsewhere", "psi") is None
    path = tmp_path / FAMILIARITY
    content = path.read_bytes()
    for changed in (content[:-9], content.replace(b"0", b"1", 1), b"", content + b" "):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"familiarity.json says nothing of training"):
            stored_familiarity(tmp_path, "psi")


@pytest.mark.parametrize(
    "change",
    [
        {"mean": [1.0]},
        {"variances": [0.0] * 8},
        {"variances": [1.0]},
        {"directions": [[1.0]]},
        {"directions": None},
        {"limits": {}},
        {"limits": {"0": 1.0}},
        {"limits": {"3": -1.0}},
        {"rest": 1e400},
        {"mean": [1e39] * WIDTH},
        {"map": {"low": [0, 0], "high": [0, 0], "counts": [[1]]}},
        {"map": {"low": [0, 0], "high": [1, 1], "counts": [[1], [1, 2]]}},
        {"map": {"low": [0], "high": [1, 1], "counts": [[1]]}},
    ],
)
def test_a_table_that_is_no_summary_is_refused(fitted: Familiarity, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_familiarity(fitted.table() | change)


def test_an_embedding_of_another_size_is_refused(fitted: Familiarity) -> None:
    with pytest.raises(CheckpointError, match="embeddings of another size"):
        fitted.judge(torch.zeros(WIDTH + 1), 3)
