"""A Triton kernel: the gradient of max-pooling, windows side by side."""
# mypy: disable-error-code="import-not-found,import-untyped"
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # pixels times channels that a program writes


@triton.jit
def _unpool(
    gy, x, gx, size,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every written pixel of a pooling [OH, OW] gives its gradient to the first largest x of its
    window.  gy [images, OH, OW, C]; x and gx [images, H, W, C]
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    c, pixel = place % C, place // C
    image, i, j = pixel // (OH * OW), pixel // OW % OH, pixel % OW
    corner = ((image * H + i * KH) * W + j * KW) * C + c
    gradient = tl.load(gy + place, inside)
    largest = tl.load(x + corner, inside)
    at = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(1, KH * KW):
        value = tl.load(x + corner + (k // KW * W + k % KW) * C, inside)
        at = tl.where(value > largest, k, at)
        largest = tl.where(value > largest, value, largest)
    for k in tl.static_range(KH * KW):
        value = tl.where(at == k, gradient, 0.0)
        tl.store(gx + corner + (k // KW * W + k % KW) * C, value.to(gx.dtype.element_ty), inside)


def unpool(gy: Tensor, x: Tensor, window: Sequence[int]) -> Tensor:
    """gy [n, c, oh, ow], x [n, c, h, w] -> [n, c, h, w], channels last in memory."""
    out: Tensor = spread(*(t.permute(0, 2, 3, 1).contiguous() for t in (gy, x)), window)
    return out.permute(0, 3, 1, 2)


@torch.library.custom_op("flowdup::spread", mutates_args=())
def spread(gy: Tensor, x: Tensor, window: Sequence[int]) -> Tensor:
    """gy [n, oh, ow, c], x [n, h, w, c] -> [n, h, w, c]."""
    _, h, w, c = x.shape
    _, oh, ow, _ = gy.shape
    whole = (h, w) == (oh * window[0], ow * window[1])
    gx = torch.empty_like(x) if whole else torch.zeros_like(x)
    with torch.cuda.device_of(x):
        _unpool[(triton.cdiv(gy.numel(), _BLOCK),)](
            gy, x, gx, gy.numel(), c, h, w, oh, ow, *window, _BLOCK, num_warps=4
        )
    return gx


@spread.register_fake
def _(gy, x, window):
    return torch.empty_like(x)
