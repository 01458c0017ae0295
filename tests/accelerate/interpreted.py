# mypy: allow-untyped-calls
# mypy: disable-error-code="call-arg, call-overload, attr-defined, func-returns-value"
"""Triton kernels on the CPU, run by `test_convolution.py` with TRITON_INTERPRET=1."""

import copy
import sys
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import conv2d, max_pool2d
from triton.runtime import interpreter

from flowdup.accelerate import kernels
from flowdup.accelerate.convolution import conv
from flowdup.accelerate.layers import for_clients
from flowdup.accelerate.normalization import _affine, _gradient
from flowdup.models import build_network
from flowdup.models.network import replaced_layers
from flowdup.random import Stream

LAYERS = [  # c, o, (h, w), kernel, stride, padding, n
    (3, 8, (9, 11), (5, 5), (1, 1), (0, 0), 3),  # taps mixed in a block
    (1, 32, (8, 8), (5, 5), (1, 1), (2, 2), 2),
    (32, 16, (6, 7), (3, 3), (1, 1), (1, 1), 4),  # a block inside a tap
    (32, 20, (7, 9), (3, 3), (2, 2), (1, 1), 3),
    (64, 16, (4, 5), (1, 1), (2, 2), (0, 0), 5),
    (6, 3, (9, 7), (4, 2), (3, 2), (2, 0), 2),
    (2, 3, (7, 7), (2, 2), (3, 3), (0, 1), 1),  # pixels under no tap
    (64, 140, (5, 5), (3, 3), (1, 1), (1, 1), 3),  # more channels than a block
]
CLIENTS = 2


class _Integers(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)


class _Int(metaclass=_Integers):
    def __new__(cls, value: Any) -> Any:
        return int(np.asarray(value).reshape(()))


def mend_the_interpreter() -> None:
    """Triton 3.6 takes int() of arrays, which NumPy 2.4 refuses, and multiplies the bits of
    bfloat16 as integers.
    """
    interpreter.int = _Int
    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype == tl.bfloat16:
            a, b = (self.cast_impl(t, tl.float32) for t in (a, b))
        return dot(self, a, b, *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


def layer(number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c, o, image, kernel, stride, padding, n = LAYERS[number]
    torch.manual_seed(number)
    x = torch.randn(CLIENTS, n, c, *image, dtype=dtype)
    w = torch.randn(CLIENTS, o, c, *kernel, dtype=dtype) / (c * kernel[0] * kernel[1]) ** 0.5
    b = torch.randn(CLIENTS, o, dtype=dtype)
    size = kernels.output_size(image, kernel, stride, padding)
    return x, w, b, torch.randn(CLIENTS, n, o, *size, dtype=dtype)


def check(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    error = (found.double() - wanted.double()).abs().max() / wanted.abs().max()
    assert error < tolerance, float(error)


def values(dtype: torch.dtype, tolerance: float) -> None:
    for number, (_, _, image, kernel, stride, padding, _) in enumerate(LAYERS):
        x, w, b, gy = layer(number, dtype)
        exact = [t.double().requires_grad_() for t in (x, w, b)]
        y = torch.stack([conv2d(*row, stride, padding) for row in zip(*exact, strict=True)])
        gx, gw, _ = torch.autograd.grad(y, exact, gy.double())
        check(kernels.conv(x, w, b, stride, padding), y.detach(), tolerance)
        check(kernels.input_gradient(gy, w, image, stride, padding), gx, tolerance)
        check(kernels.weight_gradient(gy, x, kernel, stride, padding), gw, tolerance)


def layout() -> None:
    """Any strides in, channels-last out; blocks of other sizes give the same."""
    x, w, b, gy = layer(2, torch.float32)
    how = ((1, 1), (1, 1))
    y = kernels.conv(x, w, b, *how)
    assert y.permute(0, 1, 3, 4, 2).is_contiguous()
    last = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    for same in (last, x.mT.contiguous().mT, torch.cat([x, x], 1)[:, :4]):
        assert torch.equal(kernels.conv(same, w, b, *how), y)
    shared = kernels.conv(x[:1].expand(2, -1, -1, -1, -1), w, b, *how)
    check(shared[1], conv2d(x[0].double(), w[1].double(), b[1].double(), *how), 1e-6)
    gw = kernels.weight_gradient(gy, x, (3, 3), *how)
    assert gw.permute(0, 1, 3, 4, 2).is_contiguous()
    for same in (w.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3), w.mT.clone().mT):
        assert torch.equal(kernels.conv(x, same, b, *how), y)
    for tile in (kernels.Tile(32, 16, 16), kernels.Tile(64, 32, 64)):
        check(kernels.conv(x, w, b, *how, tile), y, 1e-6)
        check(kernels.weight_gradient(gy, x, (3, 3), *how, tile), gw, 1e-6)
    expanded = torch.ones(()).expand(gy.shape)
    check(
        kernels.input_gradient(expanded, w, (6, 7), *how),
        kernels.input_gradient(expanded.clone(), w, (6, 7), *how),
        1e-12,
    )
    tall = torch.randn(2, 4, 5, 32).mT.unsqueeze(-1)  # kernels [5, 1], tap by tap already
    picture = torch.randn(2, 3, 32, 7, 7)
    check(
        kernels.conv(picture, tall, None, (1, 1), (0, 0)),
        torch.stack([conv2d(x, w) for x, w in zip(picture.double(), tall.double(), strict=True)]),
        1e-6,
    )
    turned = torch.randn(1, 2, 300, 3, 3)  # more channels than a block, shared by all clients
    many = torch.randn(2, 2, 300, 4, 4)
    check(
        kernels.conv(many, turned.expand(2, -1, -1, -1, -1), None, *how),
        torch.stack([conv2d(x, turned[0].double(), None, *how) for x in many.double()]),
        1e-5,
    )
    wide = torch.randn(1, 40, 3, 9, 9)  # its 3240 pixels are summed by several programs
    gy = torch.randn(1, 40, 4, 9, 9)
    parts = kernels.weight_gradient(gy, wide, (3, 3), *how)
    whole = torch.nn.grad.conv2d_weight(wide[0].double(), (4, 3, 3, 3), gy[0].double(), *how)
    check(parts[0], whole, 1e-5)


def recorded() -> list[str]:
    """The names of kernels as they are called from now on."""
    calls: list[str] = []
    for name in ("conv", "input_gradient", "weight_gradient"):
        kernel = getattr(kernels, name)
        setattr(kernels, name, lambda *a, f=kernel, n=name: (calls.append(n), f(*a))[1])
    return calls


def functions() -> None:
    """`vmap` takes the kernels, for gradients of second order, too."""

    def second(f: Any) -> Any:
        def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            step = grad(lambda w: f(x, w, b).tanh().square().sum())(w)
            return f(x, w - 0.1 * step, b).square().mean()

        return grad(loss, argnums=(0, 1, 2))

    calls = recorded()
    x, w, b, _ = layer(3, torch.float32)
    how = ((2, 2), (1, 1))
    found = vmap(second(lambda *t: conv(*t, *how)))(x, w, b)
    wanted = vmap(second(lambda *t: conv2d(*t, *how)))(x.double(), w.double(), b.double())
    assert set(calls) == {"conv", "input_gradient", "weight_gradient"}
    for a, exact in zip(found, wanted, strict=True):
        check(a, exact, 1e-4)


def network() -> None:
    """A network's convolutions take the kernels where its layers are replaced, and only there."""
    f = build_network("cnn-small", (1, 8, 8), 4, lambda x: x)
    plain = copy.deepcopy(f.module).double()
    weights = {n: torch.stack([w, 0.9 * w]) for n, w in f.init(Stream(0)).items()}
    x = torch.rand(2, 3, 1, 8, 8)
    calls = recorded()
    gradients = vmap(grad(lambda w, x: f(w, x).square().sum()))
    gradients(weights, x)
    assert not calls
    with replaced_layers(for_clients):
        alone = f({n: w[0] for n, w in weights.items()}, x[0])  # which `vmap` does not see
        assert not calls
        found = gradients(weights, x)
    check(alone, f({n: w[0] for n, w in weights.items()}, x[0]), 1e-6)
    assert sorted(calls) == ["conv"] * 2 + ["input_gradient"] + ["weight_gradient"] * 2
    exact = {n: w.double() for n, w in weights.items()}
    wanted = vmap(grad(lambda w, x: functional_call(plain, w, (x,)).square().sum()))(
        exact, x.double()
    )
    for name, gradient in found.items():
        check(gradient, wanted[name], 1e-4)


def poolings() -> None:
    """The kernel finds the first largest of a window, as torch does."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape, window in (((3, 5, 6, 6), (2, 2)), ((2, 3, 7, 9), (2, 3))):
            x = torch.randint(0, 6, shape).to(dtype)
            exact = x.double().requires_grad_()
            y = max_pool2d(exact, window)
            gy = torch.randn(y.shape).to(dtype)
            y.backward(gy.double())
            assert exact.grad is not None
            assert torch.equal(kernels.unpool(gy, x, window).double(), exact.grad)


def norms() -> None:
    """An image in one block or several, a program with some channels or all."""
    sizes = [(3, 8, 4, 5, 4), (2, 64, 7, 7, 32), (1, 512, 2, 2, 32)]
    sizes += [(2, 32, 35, 35, 1), (1, 64, 24, 24, 32)]  # which no program keeps
    for n, c, h, w, groups in sizes:
        gy, x = torch.randn(2, n, c, h, w)
        rows = torch.randn(2, n if n % 2 else n // 2, c)  # one for each image, or for two
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
            given = [t.to(dtype) for t in (gy, x, *rows)]
            exact = [t.double() for t in given]
            found = (
                kernels.norm_affine(*given[1:], groups, 1e-5),
                *kernels.norm_gradient(*given[:3], groups, 1e-5),
            )
            wanted = (_affine(*exact[1:], groups, 1e-5), *_gradient(*exact[:3], groups, 1e-5))
            for own, other in zip(found, wanted, strict=True):
                check(own, other, tolerance)


if __name__ == "__main__":
    mend_the_interpreter()
    parts = {
        "float32": lambda: values(torch.float32, 1e-6),
        "bfloat16": lambda: values(torch.bfloat16, 1e-2),
        "layout": layout,
        "functions": functions,
        "network": network,
        "poolings": poolings,
        "norms": norms,
    }
    parts[sys.argv[1]]()
