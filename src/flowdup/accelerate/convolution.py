"""Convolution for a cohort: under `vmap` over clients, each with weights of its own, fast on a GPU.

`vmap` of torch's convolution becomes one small kernel per client.  `Conv` and its two gradients
become one launch for all of them where Triton can be had, and a grouped convolution elsewhere:

    y = Conv(x, w) + b      gx = InputGradient(gy, w)      gw = WeightGradient(gy, x)

Each is linear in both arguments and its derivatives are the other two, so gradients of any order
exist, inside and outside of `vmap`.  Tensors are [n, c, h, w] and [o, c, kh, kw], or all of them
with clients in front: [clients, n, c, h, w] and [clients, o, c, kh, kw].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from flowdup.accelerate.dispatch import kernels_for
from flowdup.autograd import apply_function

Pair = tuple[int, int]
Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Geometry:
    """Sizes of a convolution that two of its tensors do not tell: of the third, and its steps.

    One object, because `vmap` handles every argument of a function by itself.
    """

    image: Pair  # (h, w) of x
    kernel: Pair
    stride: Pair
    padding: Pair  # zeros on either side


class Conv(torch.autograd.Function):
    """Conv.apply(x, w, bias or None, geometry)"""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, how: Geometry) -> Tensor:
        if x.ndim == 4:
            return conv2d(x, w, bias, how.stride, how.padding)
        if _fits(x, w, how) and (kernels := kernels_for(x, w, bias)):
            out: Tensor = kernels.conv(x, w, bias, how.stride, how.padding)
            return out
        b = None if bias is None else bias.flatten()
        w, groups = w.flatten(0, 1), x.shape[0]
        out = conv2d(_as_channels(x), w, b, how.stride, how.padding, groups=groups)
        return _as_clients(out, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, ctx.how = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        need_x, need_w, need_bias, _ = ctx.needs_input_grad
        gx = apply_function(InputGradient, gy, w, ctx.how) if need_x else None
        gw = apply_function(WeightGradient, gy, x, ctx.how) if need_w else None
        return gx, gw, gy.sum((-4, -2, -1)) if need_bias else None, None

    @staticmethod
    def vmap(
        info: Any, dims: Dims, x: Tensor, w: Tensor, bias: Tensor | None, how: Geometry
    ) -> tuple[Tensor, int]:
        if w.ndim == 4 and dims[1] is dims[2] is None:
            return _as_one_batch(Conv, x, dims[0], w, bias, how)
        return _over_clients(Conv, info, dims, x, w, bias, how)


class InputGradient(torch.autograd.Function):
    """InputGradient.apply(gy, w, geometry)"""

    generate_vmap_rule = False

    @staticmethod
    def forward(gy: Tensor, w: Tensor, how: Geometry) -> Tensor:
        if gy.ndim == 4:
            return _input_gradient(gy, w, how, 1)
        if kernels := kernels_for(gy, w):
            out: Tensor = kernels.input_gradient(gy, w, how.image, how.stride, how.padding)
            return out
        clients = gy.shape[0]
        gx = _input_gradient(_as_channels(gy), w.flatten(0, 1), how, clients)
        return _as_clients(gx, clients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gy, w, ctx.how = inputs
        ctx.save_for_backward(gy, w)

    @staticmethod
    def backward(ctx: Any, ggx: Tensor) -> tuple[Tensor | None, ...]:
        gy, w = ctx.saved_tensors
        need_gy, need_w, _ = ctx.needs_input_grad
        ggy = apply_function(Conv, ggx, w, None, ctx.how) if need_gy else None
        gw = apply_function(WeightGradient, gy, ggx, ctx.how) if need_w else None
        return ggy, gw, None

    @staticmethod
    def vmap(info: Any, dims: Dims, gy: Tensor, w: Tensor, how: Geometry) -> tuple[Tensor, int]:
        if w.ndim == 4 and dims[1] is None:
            return _as_one_batch(InputGradient, gy, dims[0], w, how)
        return _over_clients(InputGradient, info, dims, gy, w, how)


class WeightGradient(torch.autograd.Function):
    """WeightGradient.apply(gy, x, geometry)"""

    generate_vmap_rule = False

    @staticmethod
    def forward(gy: Tensor, x: Tensor, how: Geometry) -> Tensor:
        if gy.ndim == 4:
            return _weight_gradient(gy, x, how, 1)
        if kernels := kernels_for(gy, x):
            out: Tensor = kernels.weight_gradient(gy, x, how.kernel, how.stride, how.padding)
            return out
        clients = gy.shape[0]
        gw = _weight_gradient(_as_channels(gy), _as_channels(x), how, clients)
        return gw.reshape(clients, -1, *gw.shape[1:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gy, x, ctx.how = inputs
        ctx.save_for_backward(gy, x)

    @staticmethod
    def backward(ctx: Any, ggw: Tensor) -> tuple[Tensor | None, ...]:
        gy, x = ctx.saved_tensors
        need_gy, need_x, _ = ctx.needs_input_grad
        ggy = apply_function(Conv, x, ggw, None, ctx.how) if need_gy else None
        gx = apply_function(InputGradient, gy, ggw, ctx.how) if need_x else None
        return ggy, gx, None

    @staticmethod
    def vmap(info: Any, dims: Dims, gy: Tensor, x: Tensor, how: Geometry) -> tuple[Tensor, int]:
        return _over_clients(WeightGradient, info, dims, gy, x, how)


def conv(x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """`torch.nn.functional.conv2d`, made of `Conv`."""
    image, kernel = (x.shape[-2], x.shape[-1]), (w.shape[-2], w.shape[-1])
    return apply_function(Conv, x, w, bias, Geometry(image, kernel, stride, padding))


class ClientConv2d(nn.Conv2d):
    """`nn.Conv2d` for use under `vmap`: `Conv` where kernels make that fast, else torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim == 4 and kernels_for(input, self.weight, self.bias):
            height, width = self.stride
            return conv(input, self.weight, self.bias, (height, width), _zeros_around(self))
        return super().forward(input)


def is_supported(part: nn.Conv2d) -> bool:
    """Whether `Conv` computes what this layer does: no groups, no dilation, zeros around."""
    same = part.padding == "same"
    symmetric = not same or all(k % 2 == 1 for k in part.kernel_size)
    zeros = part.padding_mode == "zeros"
    return part.groups == 1 and part.dilation == (1, 1) and zeros and symmetric


def _zeros_around(part: nn.Conv2d) -> Pair:
    if isinstance(part.padding, str):
        same = part.padding == "same"
        return (part.kernel_size[0] // 2, part.kernel_size[1] // 2) if same else (0, 0)
    return part.padding[0], part.padding[1]


def _as_one_batch(
    function: type[torch.autograd.Function], x: Tensor, dim: int | None, *others: Any
) -> tuple[Tensor, int]:
    """Clients that share their weights are one larger batch."""
    assert dim is not None
    x = x.movedim(dim, 0)  # [clients, n, c, h, w]
    out = apply_function(function, x.flatten(0, 1), *others)
    return out.reshape(*x.shape[:2], *out.shape[1:]), 0


def _over_clients(
    function: type[torch.autograd.Function], info: Any, dims: Dims, *arguments: Any
) -> tuple[Tensor, int]:
    """With clients in front of all tensors; those of a vmap inside this one are clients, too."""
    *tensors, how = arguments
    size: int = info.batch_size
    front: list[Any] = [
        None if t is None else _front(t, dim, size)
        for t, dim in zip(tensors, dims[:-1], strict=True)
    ]
    if front[0].ndim == 5:
        return apply_function(function, *front, how), 0
    out = apply_function(function, *(None if t is None else t.flatten(0, 1) for t in front), how)
    return out.reshape(size, -1, *out.shape[1:]), 0


def clients_as_images(info: Any, dims: Dims, *tensors: Tensor) -> list[Tensor]:
    """[clients, n, ...] -> [clients n, ...], for operations on each image alone."""
    pairs = zip(tensors, dims, strict=False)
    return [_front(t, dim, info.batch_size).flatten(0, 1) for t, dim in pairs]


def _front(t: Tensor, dim: int | None, size: int) -> Tensor:
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _as_channels(x: Tensor) -> Tensor:
    """[clients, n, c, h, w] -> [n, clients c, h, w], what a grouped convolution reads."""
    return x.movedim(0, 1).flatten(1, 2)


def _as_clients(x: Tensor, clients: int) -> Tensor:
    """[n, clients c, h, w] -> [clients, n, c, h, w]"""
    n, channels, height, width = x.shape
    return x.reshape(n, clients, channels // clients, height, width).movedim(1, 0)


def _input_gradient(gy: Tensor, w: Tensor, how: Geometry, groups: int) -> Tensor:
    shape = (gy.shape[0], w.shape[1] * groups, *how.image)
    last = gy.is_contiguous(memory_format=torch.channels_last) and not gy.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(shape, dtype=gy.dtype, device=gy.device, memory_format=layout)  # never read
    return _torchs_gradients(gy, x, w, how, groups, (True, False, False))[0]


def _weight_gradient(gy: Tensor, x: Tensor, how: Geometry, groups: int) -> Tensor:
    w = x.new_empty((gy.shape[1], x.shape[1] // groups, *how.kernel))  # never read
    return _torchs_gradients(gy, x, w, how, groups, (False, True, False))[1]


def _torchs_gradients(
    gy: Tensor, x: Tensor, w: Tensor, how: Geometry, groups: int, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        gy, x, w, None, how.stride, how.padding, (1, 1), False, (0, 0), groups, wanted
    )
    return out


def _fits(x: Tensor, w: Tensor, how: Geometry) -> bool:
    """Whether the shapes are a convolution's; if not, torch says what is wrong with them."""
    sides = zip(how.image, how.kernel, how.padding, strict=True)
    return x.shape[-3] == w.shape[-3] and all(i + 2 * p >= k for i, k, p in sides)
