# mypy: allow-untyped-calls, disable-error-code="call-arg, index"
"""Convolutions of clients with weights of their own are torch's, to any order of gradients."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import conv2d

from flowdup.accelerate.convolution import (
    ClientConv2d,
    Geometry,
    InputGradient,
    WeightGradient,
    conv,
)
from flowdup.accelerate.layers import for_clients
from flowdup.data import InputSpec
from flowdup.models import Network, build_network
from flowdup.models.network import replaced_layers
from flowdup.personalize import PersonalModel
from flowdup.random import Stream

CLIENTS, N = 3, 2
LAYERS = {  # c, o, (h, w), kernel, stride, padding
    "valid": (3, 4, (9, 7), (5, 5), (1, 1), (0, 0)),
    "same": (2, 5, (6, 5), (3, 3), (1, 1), (1, 1)),
    "stride": (2, 3, (8, 7), (3, 3), (2, 2), (1, 1)),
    "point": (3, 2, (5, 6), (1, 1), (2, 2), (0, 0)),
    "even": (1, 2, (7, 8), (2, 4), (3, 2), (0, 2)),
}
BATCHED = [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 0, None), (0, None, 0), (None, None, 0)]


def tensors(layer: str, batched: tuple[int | None, ...] = (0, 0, 0)) -> list[Tensor]:
    """x, w and b with or without clients in front, numbers that need no global state."""
    c, o, image, kernel, _, _ = LAYERS[layer]
    shapes = ((N, c, *image), (o, c, *kernel), (o,))
    dims = enumerate(zip(shapes, batched, strict=True))
    return [random(shape if d is None else (CLIENTS, *shape), i) for i, (shape, d) in dims]


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def ours(layer: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, w, b: conv(x, w, b, *LAYERS[layer][4:])


def torchs(layer: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, w, b: conv2d(x, w, b, *LAYERS[layer][4:])


def one_by_one(function: Callable[..., Any], batched: tuple[int | None, ...], *args: Tensor) -> Any:
    found = []
    for i in range(CLIENTS):
        mine = (a if d is None else a[i] for a, d in zip(args, batched, strict=True))
        found.append(function(*mine))
    if isinstance(found[0], tuple):
        return tuple(map(torch.stack, zip(*found, strict=True)))
    return torch.stack(found)


def same(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    return all(x.shape == y.shape and torch.allclose(x, y, 1e-10, 1e-10) for x, y in pairs)


def bend(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A number whose derivatives of every order depend on all of x, w and b."""
    return lambda x, w, b: (f(x, w, b) * 0.3).tanh().square().sum() + f(x, w, b).sin().sum()


def inner_step(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss after a step of gradient descent in all arguments, as FedTTA has it."""

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        steps = grad(bend(f), argnums=(0, 1, 2))(x, w, b)
        return bend(f)(*(t - 0.1 * step for t, step in zip((x, w, b), steps, strict=True)))

    return loss


@pytest.mark.parametrize("batched", BATCHED)
@pytest.mark.parametrize("layer", LAYERS)
def test_values_and_gradients_of_first_and_second_order_are_those_of_each_client_alone(
    layer: str, batched: tuple[int | None, ...]
) -> None:
    args = tensors(layer, batched)
    assert same(vmap(ours(layer), batched)(*args), one_by_one(torchs(layer), batched, *args))
    for number in (bend, inner_step):
        a = vmap(grad(number(ours(layer)), argnums=(0, 1, 2)), batched)(*args)
        b = one_by_one(grad(number(torchs(layer)), argnums=(0, 1, 2)), batched, *args)
        assert same(a, b)


@pytest.mark.parametrize("batched", BATCHED)
def test_a_gradient_goes_through_vmap_from_outside(batched: tuple[int | None, ...]) -> None:
    args = tensors("stride", batched)

    def total(*args: Tensor) -> Tensor:
        return vmap(bend(ours("stride")), batched)(*args).square().sum()

    def alone(*args: Tensor) -> Tensor:
        return one_by_one(bend(torchs("stride")), batched, *args).square().sum()

    found = grad(total, argnums=(0, 1, 2))(*args)
    assert same(found, grad(alone, argnums=(0, 1, 2))(*args))


@pytest.mark.parametrize("outer", BATCHED)
@pytest.mark.parametrize("inner", [(0, 0, 0), (0, None, None), (None, 0, 0)])
def test_vmap_inside_vmap(outer: tuple[int | None, ...], inner: tuple[int | None, ...]) -> None:
    shapes = [t.shape for t in tensors("same", inner)]
    dims = enumerate(zip(shapes, outer, strict=True))
    args = [random(tuple(s) if d is None else (2, *s), i) for i, (s, d) in dims]
    a, b = (
        vmap(vmap(grad(inner_step(kind("same")), argnums=(0, 1, 2)), inner), outer)(*args)
        for kind in (ours, torchs)
    )
    assert same(a, b)


def test_clients_may_be_in_any_dimension() -> None:
    x, w, b = tensors("valid")
    y = vmap(ours("valid"), (2, 4, 1))(x.movedim(0, 2), w.movedim(0, 4), b.movedim(0, 1))
    assert same(y, vmap(ours("valid"))(x, w, b))


@pytest.mark.parametrize("clients", [(), (2,)])
@pytest.mark.parametrize("layer", LAYERS)
def test_finite_differences_agree_to_second_order(layer: str, clients: tuple[int, ...]) -> None:
    c, o, image, kernel, stride, padding = LAYERS[layer]
    x, w, b = (random((*clients, *s), 0) for s in ((1, c, *image), (o, c, *kernel), (o,)))
    how = Geometry(image, kernel, stride, padding)
    gy = random(tuple(conv(x, w, b, stride, padding).shape), 1)
    calls = (
        (lambda *t: conv(*t, stride, padding), (x, w, b)),
        (lambda *t: InputGradient.apply(*t, how), (gy, w)),
        (lambda *t: WeightGradient.apply(*t, how), (gy, x)),
    )
    for function, tensors in calls:
        inputs = tuple(t.clone().requires_grad_() for t in tensors)
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_without_clients_the_bits_and_the_memory_format_are_torchs() -> None:
    x, w, b = (t.float() for t in tensors("same", (None, None, None)))
    x = x.contiguous(memory_format=torch.channels_last)
    found, wanted = (f("same")(x, w, b) for f in (ours, torchs))
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()


def test_shapes_that_do_not_fit_are_torchs_errors() -> None:
    x, w, b = tensors("valid")
    with pytest.raises(RuntimeError, match="channels"):
        vmap(ours("valid"))(x[:, :, :2], w, b)
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        vmap(ours("valid"))(x[..., :3], w, b)


class Own(nn.Module):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 4, 3, padding="same")
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 2, stride=2, padding="valid"))
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.dilated = nn.Conv2d(4, 4, 3, dilation=2, padding=2)
        self.mirrored = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        self.lopsided = nn.Conv2d(4, outputs, (2, 1), padding="same")

    def forward(self, x: Tensor) -> Tensor:
        x = self.mirrored(self.dilated(self.grouped(self.body(self.stem(x)))))
        out: Tensor = self.lopsided(x).sum((2, 3))
        return out


def test_a_users_convolutions_are_exchanged_where_ours_compute_the_same() -> None:
    module = for_clients(Own((2, 8, 8), 3))
    exchanged = {n for n, part in module.named_modules() if isinstance(part, ClientConv2d)}
    assert exchanged == {"stem", "body.1"}
    resnet = for_clients(build_network("resnet18", (3, 8, 8), 10, lambda x: x).module)
    kinds = [type(part) for part in resnet.modules() if isinstance(part, nn.Conv2d)]
    assert kinds == [ClientConv2d] * 20


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", ["own", "cnn-small", "resnet18", "resnet18-imagenet"])
def test_a_network_with_replaced_layers_computes_what_the_module_does(name: str) -> None:
    if name == "own":
        network = Network.build(Own, (2, 8, 8), 3, lambda x: x)
    else:
        network = build_network(name, (2, 8, 8), 3, lambda x: x)
    weights = {n: w.double() for n, w in network.init(Stream(0)).items()}
    clients = {n: torch.stack([w, w + 0.01, w * 0.9]) for n, w in weights.items()}
    x = random((CLIENTS, N, 2, 8, 8), 0)
    plain = copy.deepcopy(network.module).double()

    def loss(f: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
        return grad(lambda weights, x: f(weights, x).square().sum())

    with replaced_layers(for_clients):
        found = vmap(loss(network))(clients, x)
    for i in range(CLIENTS):
        mine = {n: w[i] for n, w in clients.items()}
        alone = loss(lambda weights, x: functional_call(plain, weights, (x,)))(mine, x[i])
        assert all(torch.allclose(found[n][i], alone[n], 1e-8, 1e-8) for n in alone)


def test_a_personal_model_has_ordinary_convolutions() -> None:
    spec = InputSpec((1, 8, 8), "uint8", 4, (0.3,), (0.4,))
    weights = build_network("cnn-small", spec.shape, 4, lambda x: x).init(Stream(0))
    model = copy.deepcopy(PersonalModel("cnn-small", spec, weights))
    kinds = {type(part) for part in model.modules() if isinstance(part, nn.Conv2d)}
    assert kinds == {nn.Conv2d}


def test_an_exchanged_layer_takes_one_image_without_a_batch_as_torchs_does() -> None:
    module = for_clients(nn.Sequential(nn.Conv2d(1, 2, 3)))
    x = torch.ones(1, 4, 4)
    assert torch.equal(module(x), module(x[None])[0])


@pytest.mark.parametrize(
    "part", ["float32", "bfloat16", "layout", "functions", "network", "poolings", "norms"]
)
def test_triton_kernels_agree_with_float64(part: str) -> None:
    """Under Triton's interpreter, which has to be on before Triton is imported."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed; PyTorch for the CPU comes without it")
    script = Path(__file__).parent / "interpreted.py"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
