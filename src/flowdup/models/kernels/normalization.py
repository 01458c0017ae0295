"""A Triton kernel: what GroupNorm needs to know of an image, channels last, in one pass."""
# mypy: disable-error-code="import-not-found,import-untyped"
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # pixels times channels that a program reads at once


@triton.jit
def _group_mean(sums, area, C: tl.constexpr, G: tl.constexpr):
    """Of every channel's group, from the channels' sums [C]."""
    grid = tl.reshape(sums, (G, C // G))
    mean = tl.sum(grid, 1) / area
    return tl.reshape(tl.broadcast_to(mean[:, None], (G, C // G)), (C,))


@triton.jit
def _norm(
    gy, x, w, out, pixels, eps,
    C: tl.constexpr, G: tl.constexpr, BACK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One image: mean and 1 / sqrt(variance + eps) of every channel's group; backward, what
    `normalization.Slopes` says.  gy and x [images, pixels, C]; w [images, C];
    out [images, C, 2 or 5]
    """
    image = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    tile_x = tl.zeros((P, C), tl.float32)
    tile_xx = tl.zeros((P, C), tl.float32)
    tile_g = tl.zeros((P, C), tl.float32)
    tile_gx = tl.zeros((P, C), tl.float32)
    for start in range(0, pixels, P):
        p = start + tl.arange(0, P)
        place = (image * pixels + p)[:, None] * C + c[None, :]
        here = (p < pixels)[:, None]
        value = tl.load(x + place, here, other=0.0).to(tl.float32)
        tile_x += value
        tile_xx += value * value
        if BACK:
            gradient = tl.load(gy + place, here, other=0.0).to(tl.float32)
            tile_g += gradient
            tile_gx += gradient * value
    sum_x, sum_xx = tl.sum(tile_x, 0), tl.sum(tile_xx, 0)
    sum_g, sum_gx = tl.sum(tile_g, 0), tl.sum(tile_gx, 0)
    area = pixels * (C // G)
    mean = _group_mean(sum_x, area, C, G)
    variance = tl.maximum(_group_mean(sum_xx, area, C, G) - mean * mean, 0.0)
    s = 1.0 / tl.sqrt(variance + eps)
    if BACK:
        weight = tl.load(w + image * C + c).to(tl.float32)
        along = s * (sum_gx - mean * sum_g)
        a = _group_mean(weight * sum_g, area, C, G)
        q = s * s * _group_mean(weight * along, area, C, G)
        out += (image * C + c) * 5
        tl.store(out, s * weight)
        tl.store(out + 1, q)
        tl.store(out + 2, mean * q - s * a)
        tl.store(out + 3, along)
        tl.store(out + 4, sum_g)
    else:
        out += (image * C + c) * 2
        tl.store(out, mean)
        tl.store(out + 1, s)


def moments(x: Tensor, groups: int, eps: float) -> Tensor:
    """x [n, c, h, w] -> [n, c, 2]; c and groups are powers of two."""
    x = x.permute(0, 2, 3, 1).contiguous()
    out: Tensor = norm(x, None, None, groups, eps)
    return out


def slopes(gy: Tensor, x: Tensor, w: Tensor, groups: int, eps: float) -> Tensor:
    """gy and x [n, c, h, w], w [c] or [n, c] -> [n, c, 5]."""
    gy, x = (t.permute(0, 2, 3, 1).contiguous() for t in (gy, x))
    out: Tensor = norm(x, gy, w.expand(x.shape[0], -1).contiguous(), groups, eps)
    return out


@torch.library.custom_op("flowdup::norm", mutates_args=())
def norm(x: Tensor, gy: Tensor | None, w: Tensor | None, groups: int, eps: float) -> Tensor:
    """x and gy [n, h, w, c], w [n, c] -> [n, c, 5], without gy [n, c, 2]."""
    n, height, width, c = x.shape
    back = gy is not None
    out = x.new_empty((n, c, 5 if back else 2), dtype=torch.float32)
    block = max(1, min(triton.next_power_of_2(height * width), _TILE // c))
    with torch.cuda.device_of(x):
        _norm[(n,)](
            gy if back else x, x, w if back else x, out, height * width, eps,
            c, groups, back, block, num_warps=4,
        )  # fmt: skip
    return out


@norm.register_fake
def _(x, gy, w, groups, eps):
    return x.new_empty((x.shape[0], x.shape[3], 2 if gy is None else 5), dtype=torch.float32)
