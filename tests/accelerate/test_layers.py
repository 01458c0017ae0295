"""Layers for a cohort compute what torch's do, with gradients of first and second order."""

import pytest
import torch
from small import METHODS, STREAM, first_task
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import group_norm, max_pool2d

from flowdup.accelerate.convolution import ClientConv2d
from flowdup.accelerate.layers import for_clients
from flowdup.accelerate.normalization import ClientGroupNorm, GroupNorm
from flowdup.accelerate.pooling import ClientMaxPool2d, ClientMean2d, MaxPool
from flowdup.aggregation import total
from flowdup.autograd import apply_function
from flowdup.batches import batch_plan, local_batches
from flowdup.client import ClientConfig, ClientUpdate
from flowdup.data import ClientData, InputSpec
from flowdup.engines import EngineConfig, SupportQuery, build_engine
from flowdup.methods import MethodConfig, MethodContext
from flowdup.models import register_model


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
    check(lambda x: apply_function(MaxPool, x, window), lambda x: max_pool2d(x, window), x)


@pytest.mark.parametrize(("channels", "groups"), [(8, 4), (6, 3), (4, 1), (4, 4)])
def test_group_norm(channels: int, groups: int) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 5, channels, 4, 3), (3, channels), (3, channels)]
    tensors = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    check(
        lambda x, w, b: apply_function(GroupNorm, x, w, b, groups, 1e-5),
        lambda x, w, b: group_norm(x, groups, w, b, 1e-5),
        *tensors,
    )


def test_layers_are_exchanged_where_ours_compute_the_same() -> None:
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=1),
        nn.AdaptiveAvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
    )
    x = torch.rand(2, 2, 12, 12).contiguous(memory_format=torch.channels_last)
    wanted = module(x)
    own = [ClientConv2d, ClientGroupNorm, ClientMaxPool2d, nn.MaxPool2d]
    own += [nn.AdaptiveAvgPool2d, ClientMean2d]
    assert [type(part) for part in for_clients(module).children()] == own
    assert torch.allclose(module(x), wanted, atol=1e-6)


def pooled(shape: tuple[int, ...], outputs: int) -> nn.Module:
    convolution = nn.Conv2d(shape[0], 4, 3)
    return nn.Sequential(convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, outputs))


register_model("pooled", pooled)


@pytest.mark.filterwarnings("error:There is a performance drop")  # `vmap` loops over clients
@pytest.mark.parametrize("kind", ["sequential", "batched"])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_mean_over_an_image_trains_on_every_engine(kind: str, compiled: bool) -> None:
    """torch's own has no `vmap` for images whose channels lie last, as engines have them."""
    spec, config = InputSpec((3, 8, 8), "float32", 4), ClientConfig(2, 10, 0.5)
    context = MethodContext("pooled", spec, STREAM, "cpu", torch.float64)
    m = MethodConfig.from_table(METHODS["fedavg"]).build(context)
    psi = {n: p.double() for n, p in m.init(STREAM).items()}
    draw = torch.Generator().manual_seed(0)
    data = ClientData(torch.rand(23, 3, 8, 8, generator=draw), torch.arange(23) % 4)
    settings = EngineConfig(kind, "cpu", "float64", compile=compiled)
    engine = build_engine(settings, m, config, [data], STREAM)
    found = total(engine.train(first_task(m, psi))).delta
    plan = batch_plan(STREAM.child("order", 1), 0, len(data), 2, 10)
    batches = local_batches(data, plan, torch.device("cpu"), torch.float64)
    wanted = ClientUpdate(m, config)(first_task(m, psi), batches).delta
    for name, change in found.items():
        assert torch.allclose(change, wanted[name], atol=1e-12)
    assert wanted["0.weight"].abs().max() > 1e-3
    (logits,) = engine.logits(psi, [SupportQuery(data.x, data.x)])
    assert torch.allclose(logits, m.f(psi, data.x), atol=1e-12)
