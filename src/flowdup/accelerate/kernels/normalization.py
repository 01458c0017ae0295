"""Triton kernels: what GroupNorm makes of an image, channels last, and its gradient."""
# mypy: disable-error-code="import-not-found,import-untyped"
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

_WHOLE = 8192  # pixels times channels that a program can keep in its registers
_BLOCK = 4096  # that it looks at together where it cannot
_LEAST = 1024  # that are worth a program
_WARP = 2048  # that a warp has of an image that is kept
_TOGETHER = 64  # bytes of a pixel that are read together


@triton.jit
def _group_mean(sums, area, C: tl.constexpr, G: tl.constexpr):
    """Of every channel's group, from the channels' sums [C]."""
    grid = tl.reshape(sums, (G, C // G))
    mean = tl.sum(grid, 1) / area
    return tl.reshape(tl.broadcast_to(mean[:, None], (G, C // G)), (C,))


@triton.jit(do_not_specialize=["images"])
def _norm(
    gy, x, w, b, gx, out, pixels, images, eps,
    ALL: tl.constexpr, C: tl.constexpr, G: tl.constexpr, BACK: tl.constexpr, P: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """C of an image's channels, G groups: what `normalization.Affine` says; backward, what
    `normalization.Gradient` says.  If the image is one WHOLE block of pixels, it is read once.
    gy, x and gx [., pixels, ALL]; w and b [., ALL], a row for so many `images`; out [., ALL, 2]
    """
    image = (tl.program_id(0) // (ALL // C)).to(tl.int64)
    c = tl.program_id(0) % (ALL // C) * C + tl.arange(0, C)
    p = tl.arange(0, P)
    place = (image * pixels + p)[:, None] * ALL + c[None, :]
    value = tl.load(x + place, (p < pixels)[:, None], other=0.0)
    tile_x = value.to(tl.float32)
    tile_xx = tile_x * tile_x
    if BACK:
        slope = tl.load(gy + place, (p < pixels)[:, None], other=0.0)
        tile_g = slope.to(tl.float32)
        tile_gx = tile_g * tile_x
    if not WHOLE:
        for start in range(P, pixels, P):
            here = (start + p < pixels)[:, None]
            more = tl.load(x + place + start * ALL, here, other=0.0).to(tl.float32)
            tile_x += more
            tile_xx += more * more
            if BACK:
                steep = tl.load(gy + place + start * ALL, here, other=0.0).to(tl.float32)
                tile_g += steep
                tile_gx += steep * more
    area = pixels * (C // G)
    mean = _group_mean(tl.sum(tile_x, 0), area, C, G)
    square = _group_mean(tl.sum(tile_xx, 0), area, C, G)
    s = 1.0 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + eps)
    out += (image * ALL + c) * 2
    own = image // images * ALL + c
    weight = tl.load(w + own).to(tl.float32)
    if BACK:
        sum_g, sum_gx = tl.sum(tile_g, 0), tl.sum(tile_gx, 0)
        mean_g = _group_mean(weight * sum_g, area, C, G)
        along = s * s * s * (_group_mean(weight * sum_gx, area, C, G) - mean * mean_g)
        level = (s * mean_g - along * mean)[None, :]
        along, weight = along[None, :], (weight * s)[None, :]
        found = weight * slope.to(tl.float32) - level - along * value.to(tl.float32)
        found = found.to(gx.dtype.element_ty)
        tl.store(gx + place, found, (p < pixels)[:, None], eviction_policy="evict_first")
        if not WHOLE:  # the last look at x and gy, which need not stay in the cache
            for start in range(P, pixels, P):
                at, here = place + start * ALL, (start + p < pixels)[:, None]
                more = tl.load(x + at, here, other=0.0, eviction_policy="evict_first")
                steep = tl.load(gy + at, here, other=0.0, eviction_policy="evict_first")
                found = weight * steep.to(tl.float32) - level - along * more.to(tl.float32)
                found = found.to(gx.dtype.element_ty)
                tl.store(gx + at, found, here, eviction_policy="evict_first")
        tl.store(out, s * (sum_gx - mean * sum_g))
        tl.store(out + 1, sum_g)
    else:
        tl.store(out, s * weight)
        tl.store(out + 1, tl.load(b + own).to(tl.float32) - mean * s * weight)


def norm_affine(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
    """x [n, c, h, w], w and b [rows, c] -> [n, c, 2]; c and groups are powers of two."""
    out: Tensor = affine(_channels_last(x), w.contiguous(), b.contiguous(), groups, eps)
    return out


def norm_gradient(
    gy: Tensor, x: Tensor, w: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    """gy and x [n, c, h, w], w [rows, c] -> [n, c, h, w] and [n, c, 2]."""
    gx, sums = gradient(_channels_last(gy), _channels_last(x), w.contiguous(), groups, eps)
    return gx.permute(0, 3, 1, 2), sums


@torch.library.custom_op("flowdup::norm_affine", mutates_args=())
def affine(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
    """x [n, h, w, c], w and b [rows, c] -> [n, c, 2]."""
    out = _sums(x)
    _launch(x, x, w, b, x, out, groups, eps, False)
    return out


@affine.register_fake
def _(x, w, b, groups, eps):
    return _sums(x)


@torch.library.custom_op("flowdup::norm_gradient", mutates_args=())
def gradient(gy: Tensor, x: Tensor, w: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """gy and x [n, h, w, c], w [rows, c] -> [n, h, w, c] and [n, c, 2]."""
    gx, out = torch.empty_like(x), _sums(x)
    _launch(gy, x, w, w, gx, out, groups, eps, True)
    return gx, out


@gradient.register_fake
def _(gy, x, w, groups, eps):
    return torch.empty_like(x), _sums(x)


def _launch(gy, x, w, b, gx, out, groups, eps, back) -> None:
    n, height, width, c = x.shape
    pixels = height * width
    rows = triton.next_power_of_2(pixels)
    share = max(c // groups, min(c, _TOGETHER // x.element_size()))  # channels of one program
    whole = rows * share <= _WHOLE
    if whole:
        share = max(share, min(c, _LEAST // rows))
    block, warps = (rows, max(1, rows * share // _WARP)) if whole else (max(1, _BLOCK // share), 8)
    with torch.cuda.device_of(x):
        _norm[(n * c // share,)](
            gy, x, w, b, gx, out, pixels, n // w.shape[0], eps,
            c, share, share * groups // c, back, block, whole, num_warps=warps,
        )  # fmt: skip


def _sums(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[3], 2), dtype=torch.float32)


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous()
