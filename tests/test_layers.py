# mypy: disable-error-code="attr-defined"
"""Layers for a cohort compute what torch's do, with gradients of first and second order."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import group_norm, max_pool2d

from flowdup.models.cohort import for_clients, ordinary
from flowdup.models.convolution import ClientConv2d, apply
from flowdup.models.normalization import ClientGroupNorm, GroupNorm
from flowdup.models.pooling import ClientMaxPool2d, ClientMean2d, MaxPool


def gradients(layer, *tensors: Tensor) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Of first and second order, for every client."""
    places = tuple(range(len(tensors)))

    def first(*own: Tensor) -> Tensor:
        return layer(*own).sin().sum()

    def second(*own: Tensor) -> Tensor:
        found = grad(first, places)(*own)
        return sum((g.cos() * (i + 1)).sum() for i, g in enumerate(found))

    return [g for f in (first, second) for g in vmap(grad(f, places))(*tensors)]


def check(ours, torchs, *tensors: Tensor) -> None:  # type: ignore[no-untyped-def]
    assert torch.allclose(vmap(ours)(*tensors), vmap(torchs)(*tensors), atol=1e-12)
    pairs = zip(gradients(ours, *tensors), gradients(torchs, *tensors), strict=True)
    for found, wanted in pairs:
        assert torch.allclose(found, wanted, atol=1e-9)


@pytest.mark.parametrize(("size", "window"), [((6, 6), (2, 2)), ((7, 9), (2, 3)), ((5, 4), (1, 4))])
def test_max_pooling_with_ties_and_rows_that_no_window_covers(
    size: tuple[int, int], window: tuple[int, int]
) -> None:
    x = torch.randint(0, 4, (3, 2, 4, *size), generator=torch.Generator().manual_seed(0)).double()
    check(lambda x: apply(MaxPool, x, window), lambda x: max_pool2d(x, window), x)


@pytest.mark.parametrize(("channels", "groups"), [(8, 4), (6, 3), (4, 1), (4, 4)])
def test_group_norm(channels: int, groups: int) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 5, channels, 4, 3), (3, channels), (3, channels)]
    tensors = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    check(
        lambda x, w, b: apply(GroupNorm, x, w, b, groups, 1e-5),
        lambda x, w, b: group_norm(x, groups, w, b, 1e-5),
        *tensors,
    )


def test_layers_are_exchanged_where_they_are_plain_and_back_again() -> None:
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=1),
        nn.AdaptiveAvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
    )
    before = [type(part) for part in module]
    x = torch.rand(2, 2, 12, 12).contiguous(memory_format=torch.channels_last)
    wanted = module(x)
    own = [ClientConv2d, ClientGroupNorm, ClientMaxPool2d, nn.MaxPool2d, before[4], ClientMean2d]
    assert [type(part) for part in for_clients(module)] == own
    assert torch.allclose(module(x), wanted, atol=1e-6)
    assert [type(part) for part in ordinary(module)] == before
