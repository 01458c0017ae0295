"""Triton kernels: the convolutions of many clients, each with weights of its own, in one launch.

Implicit matrix products without im2col.  Images lie channels-last, so a pixel's channels are one
run of memory.  Inside a client a product is

    forward          [n oh ow, kh kw c] x [kh kw c, o]
    input gradient   [n h w, kh kw o] x [kh kw o, c]
    weight gradient  [kh kw c, n oh ow] x [n oh ow, o]

with float32 sums of TF32 (or float32, as `torch.backends.cudnn.conv.fp32_precision` says) or
bfloat16 products.  Weights lie tap by tap, [o, kh, kw, c]; `transpose` brings them into that order.
Blocks follow from shapes alone and no sum is atomic, so the same shapes on the same device give the
same bits.
"""
# mypy: disable-error-code="import-not-found,import-untyped"
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]

_TRANSPOSED = 4096  # weights that a program transposes
_PROGRAMS = 512  # that a weight gradient should have, about four per multiprocessor


class Tile(NamedTuple):
    """What one program computes at a time: [m, k] x [k, n]."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3


@triton.jit(do_not_specialize=["images"])
def _gather(  # noqa: PLR0915
    x, w, bias, out, images, x_step, w_step, bias_step,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr,
    F_STEP: tl.constexpr, TAP_STEP: tl.constexpr, C_STEP: tl.constexpr,  # of w
    BACK: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Every written pixel [OH, OW] gathers the read pixels [H, W] under its taps.

    Forward, pixel i reads i S - P + t with tap t.  Backward, pixel i S + a reads i + (a + P) // S
    - t with tap (a + P) % S + t S: pixels of one phase a share their taps, and each program has
    one phase, so a stride multiplies nothing by zero.
    x [clients, images, H, W, C]; w [clients, F, KH, KW, C]; out [clients, images, OH, OW, F]
    """
    UP_H: tl.constexpr = SH if BACK else 1
    UP_W: tl.constexpr = SW if BACK else 1
    GH: tl.constexpr = (OH + UP_H - 1) // UP_H  # pixels of one phase
    GW: tl.constexpr = (OW + UP_W - 1) // UP_W
    COLUMNS: tl.constexpr = (F + N - 1) // N
    program = tl.program_id(0)
    o = (program % COLUMNS) * N + tl.arange(0, N)
    program = program // COLUMNS
    phase = program % (UP_H * UP_W)
    program = program // (UP_H * UP_W)
    tiles = tl.cdiv(images * GH * GW, M)
    client = (program // tiles).to(tl.int64)

    row = (program % tiles) * M + tl.arange(0, M)
    image = row // (GH * GW)
    i = row // GW % GH
    j = row % GW
    if BACK:
        down = phase // SW + PH
        right = phase % SW + PW
        top, left = down % SH, right % SW  # the first tap
        height, width = (KH - top + SH - 1) // SH, (KW - left + SW - 1) // SW
        h, v = i + down // SH, j + right // SW
        i, j = i * SH + phase // SW, j * SW + phase % SW
    else:
        height, width = KH, KW
        h, v = i * SH - PH, j * SW - PW
    written = (row < images * GH * GW) & (i < OH) & (j < OW)
    pixels = x + client * x_step + ((image * H + h).to(tl.int64) * W + v) * C
    taps = w + client * w_step + o * F_STEP
    depth = height * width * C

    total = tl.zeros((M, N), tl.float32)
    for k in range(0, depth, K):
        # [M, 1] or [M, K]: a block inside one tap needs far less arithmetic
        if C % K == 0:
            tap = k // C
            c = tl.max_contiguous(tl.multiple_of(k % C + tl.arange(0, K), K), K)[None, :]
            here = written[:, None]
            there = (o < F)[:, None]
        else:
            tap = (k + tl.arange(0, K))[None, :] // C
            c = (k + tl.arange(0, K))[None, :] % C
            here = written[:, None] & (tap < height * width)
            there = (o < F)[:, None] & (tap < height * width)
        t, u = tap // width, tap % width
        if BACK:
            y, z = h[:, None] - t, v[:, None] - u
            read = c - (t * W + u) * C
            weight = ((top + t * SH) * KW + left + u * SW) * TAP_STEP + c * C_STEP
        else:
            y, z = h[:, None] + t, v[:, None] + u
            read = (t * W + u) * C + c
            weight = tap * TAP_STEP + c * C_STEP
        if BACK or PH > 0 or PW > 0:
            here = here & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        a = tl.load(pixels[:, None] + read, here, other=0.0)
        b = tl.load(taps[:, None] + weight, there, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)

    if BIAS:
        total += tl.load(bias + client * bias_step + o, o < F, other=0.0).to(tl.float32)[None, :]
    place = out + (((client * images + image) * OH + i) * OW + j) * F
    mask = written[:, None] & (o < F)[None, :]
    tl.store(place[:, None] + o[None, :], total.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["images", "clients", "chunk"])
def _correlate(
    x, gy, out, images, clients, chunk, x_step, gy_step,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sums over the `chunk` pixels of gy from the split's first on.

    x [clients, images, H, W, C]; gy [clients, images, OH, OW, F];
    out [splits, clients, F, KH, KW, C]
    """
    ROWS: tl.constexpr = (KH * KW * C + M - 1) // M
    COLUMNS: tl.constexpr = (F + N - 1) // N
    program = tl.program_id(0)
    o = (program % COLUMNS) * N + tl.arange(0, N)
    program = program // COLUMNS
    row = (program % ROWS) * M
    program = program // ROWS
    pixels = images * (OH * OW)
    splits = tl.cdiv(pixels, chunk)
    first = (program % splits) * chunk
    client = (program // splits).to(tl.int64)

    r = row + tl.arange(0, M)
    if C % M == 0:  # a block inside one tap, as in _gather
        tap = row // C
        c = tl.max_contiguous(tl.multiple_of(row % C + tl.arange(0, M), M), M)[None, :]
    else:
        tap = r[None, :] // C
        c = r[None, :] % C
    t, u = tap // KW, tap % KW
    off = (t * W + u) * C + c  # [1, M]
    x += client * x_step
    gy += client * gy_step

    total = tl.zeros((M, N), tl.float32)
    for start in range(first, tl.minimum(first + chunk, pixels), K):
        p = start + tl.arange(0, K)
        h = p // OW % OH * SH - PH
        v = p % OW * SW - PW
        place = x + ((p // (OH * OW) * H + h).to(tl.int64) * W + v) * C
        here = (p < pixels)[:, None] & (r < KH * KW * C)[None, :]
        if PH > 0 or PW > 0:
            y, z = h[:, None] + t, v[:, None] + u
            here = here & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        a = tl.load(place[:, None] + off, here, other=0.0)
        there = (p < pixels)[:, None] & (o < F)[None, :]
        b = tl.load((gy + p.to(tl.int64) * F)[:, None] + o[None, :], there, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)

    out += ((program % splits) * clients + client) * (F * KH * KW * C)
    mask = (r < KH * KW * C)[:, None] & (o < F)[None, :]
    place = out + r[:, None] + (o * (KH * KW * C))[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask)


@triton.jit
def _transpose(x, out, A: tl.constexpr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """x [rows, A, B] -> out [rows, B, A]"""
    TILES: tl.constexpr = (A + M - 1) // M
    first = (tl.program_id(0) // TILES).to(tl.int64) * (A * B)
    a = (tl.program_id(0) % TILES) * M + tl.arange(0, M)
    b = tl.arange(0, N)
    inside = (a < A)[:, None] & (b < B)[None, :]
    value = tl.load(x + first + a[:, None] * B + b[None, :], inside)
    tl.store(out + first + b[:, None] * A + a[None, :], tl.trans(value), tl.trans(inside))


def conv(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, tile: Tile | None = None
) -> Tensor:
    """x [clients, n, c, h, w], w [clients, o, c, kh, kw], bias [clients, o]
    -> [clients, n, o, oh, ow], channels last in memory.
    """
    kernel, image = (w.shape[3], w.shape[4]), (x.shape[3], x.shape[4])
    size = output_size(image, kernel, stride, padding)
    bias = None if bias is None else bias.contiguous()
    return _gather_pixels(x, w, bias, size, stride, padding, False, tile)


def input_gradient(
    gy: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair, tile: Tile | None = None
) -> Tensor:
    """gy [clients, n, o, oh, ow], w [clients, o, c, kh, kw] -> [clients, n, c, *size]."""
    return _gather_pixels(gy, w, None, size, stride, padding, True, tile)


def weight_gradient(
    gy: Tensor, x: Tensor, size: Pair, stride: Pair, padding: Pair, tile: Tile | None = None
) -> Tensor:
    """gy [clients, n, o, oh, ow], x [clients, n, c, h, w] -> [clients, o, c, *size], channels
    last in memory.
    """
    rows, o = size[0] * size[1] * x.shape[2], gy.shape[2]
    tile = tile or _correlate_tile(rows, o, x.shape[2], x.dtype)
    out: Tensor = correlate(_channels_last(x), _channels_last(gy), size, stride, padding, tile)
    total = out.sum(0) if out.shape[0] > 1 else out[0]
    return total.permute(0, 1, 4, 2, 3).to(x.dtype)


def output_size(image: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    height, width = (
        (i + 2 * p - k) // s + 1 for i, k, s, p in zip(image, kernel, stride, padding, strict=True)
    )
    return height, width


def _gather_pixels(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    size: Pair,
    stride: Pair,
    padding: Pair,
    back: bool,
    tile: Tile | None,
) -> Tensor:
    phases = stride if back else (1, 1)
    rows = x.shape[1] * triton.cdiv(size[0], phases[0]) * triton.cdiv(size[1], phases[1])
    w = _taps_first(w)
    if back:
        w = w.transpose(1, 4)
        if w.dtype == torch.float32:  # TF32 products want the summed channels side by side
            w = w.contiguous()
    tile = tile or _gather_tile(rows, w.shape[1], x.shape[2], (w.shape[2], w.shape[3]), x.dtype)
    x = _channels_last(x)
    out: Tensor = gather(x, w, bias, size, stride, padding, back, tile)
    return out.permute(0, 1, 4, 2, 3)


# Below, tensors are channels last: what a compiler sees as one operation each.


@torch.library.custom_op("flowdup::gather", mutates_args=())
def gather(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    back: bool,
    tile: Sequence[int],
) -> Tensor:
    """x [clients, n, h, w, c], w [clients, o, kh, kw, c], o and c in any order of memory
    -> [clients, n, *size, o].
    """
    clients, n, height, width, c = x.shape
    o, kernel = w.shape[1], (w.shape[2], w.shape[3])
    m, columns, k, warps, stages = tile
    up, across = stride if back else (1, 1)
    rows = n * triton.cdiv(size[0], up) * triton.cdiv(size[1], across)
    programs = clients * triton.cdiv(rows, m) * up * across * triton.cdiv(o, columns)
    b = w if bias is None else bias
    tap = w.stride(3 if kernel[1] > 1 else 2)  # that of a dimension of size 1 says nothing
    out = x.new_empty((clients, n, *size, o))
    with torch.cuda.device_of(x):
        _gather[(programs,)](
            x, w, b, out, n, x.stride(0), w.stride(0), b.stride(0),
            c, height, width, o, *size, *kernel, *stride, *padding,
            w.stride(1), tap, w.stride(4), back, bias is not None, _precision(),
            m, columns, k, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


@gather.register_fake
def _(x, w, bias, size, stride, padding, back, tile):
    return x.new_empty((*x.shape[:2], *size, w.shape[1]))


@torch.library.custom_op("flowdup::correlate", mutates_args=())
def correlate(
    x: Tensor,
    gy: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    tile: Sequence[int],
) -> Tensor:
    """x [clients, n, h, w, c], gy [clients, n, oh, ow, o] -> parts [splits, clients, o, *size, c]
    of a sum, in float32 if there are several.
    """
    clients, n, h, w, c = x.shape
    oh, ow, o = gy.shape[2:]
    m, columns, k, warps, stages = tile
    tiles, chunk = _split(x, gy, size, tile)
    splits = triton.cdiv(n * oh * ow, chunk)
    out = x.new_empty((splits, clients, o, *size, c), dtype=_dtype(x, splits))
    with torch.cuda.device_of(x):
        _correlate[(tiles * splits,)](
            x, gy, out, n, clients, chunk, x.stride(0), gy.stride(0),
            c, h, w, o, oh, ow, *size, *stride, *padding, _precision(), m, columns, k,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


@correlate.register_fake
def _(x, gy, size, stride, padding, tile):
    _, chunk = _split(x, gy, size, tile)
    splits = triton.cdiv(gy.shape[1] * gy.shape[2] * gy.shape[3], chunk)
    shape = (splits, x.shape[0], gy.shape[4], *size, x.shape[4])
    return x.new_empty(shape, dtype=_dtype(x, splits))


def _dtype(x: Tensor, splits: int) -> torch.dtype:
    return x.dtype if splits == 1 else torch.float32


@torch.library.custom_op("flowdup::transpose", mutates_args=())
def transpose(x: Tensor) -> Tensor:
    """x [clients, o, a, b] -> [clients, o, b, a], b small."""
    clients, o, a, b = x.shape
    out = x.new_empty((clients, o, b, a))
    n = triton.next_power_of_2(b)
    m = min(triton.next_power_of_2(a), max(16, _TRANSPOSED // n))
    with torch.cuda.device_of(x):
        _transpose[(clients * o * triton.cdiv(a, m),)](x, out, a, b, m, n, num_warps=4)
    return out


@transpose.register_fake
def _(x):
    return x.new_empty((*x.shape[:2], x.shape[3], x.shape[2]))


def _split(x: Tensor, gy: Tensor, size: Sequence[int], tile: Sequence[int]) -> Pair:
    """A weight gradient's blocks, and the pixels of one part of its sum."""
    m, columns, k = tile[:3]
    rows, pixels = size[0] * size[1] * x.shape[4], gy.shape[1] * gy.shape[2] * gy.shape[3]
    tiles = triton.cdiv(rows, m) * triton.cdiv(gy.shape[4], columns) * x.shape[0]
    return tiles, triton.cdiv(triton.cdiv(pixels, k), max(1, _PROGRAMS // tiles)) * k


def _gather_tile(rows: int, o: int, c: int, kernel: Pair, dtype: torch.dtype) -> Tile:
    """128 rows, all channels up to 128 (256), and a depth that stays inside a tap where it can."""
    n = min(128, max(16, triton.next_power_of_2(o)))
    deep = dtype == torch.bfloat16 and c % 64 == 0
    if deep and o % 256 == 0:
        return Tile(128, 256, 64, warps=8, stages=4)
    depth = kernel[0] * kernel[1] * c
    k = 64 if deep else 32
    if c % 32 != 0 and 0 < depth % 32 <= 16:
        k = 16
    return Tile(128 if rows > 64 else 64, n, k, warps=8 if n == 128 else 4)


def _correlate_tile(rows: int, o: int, c: int, dtype: torch.dtype) -> Tile:
    """Rows that stay inside a tap where c allows it, else as many as 128."""
    m = 64 if c == 64 else min(128, max(16, triton.next_power_of_2(rows)))
    n = min(128, max(16, triton.next_power_of_2(o)))
    if dtype == torch.bfloat16:
        n = 256 if m == 128 and o % 256 == 0 else n
        large = m * n >= 128 * 128
        return Tile(m, n, 64, warps=8 if large else 4, stages=3 if large else 4)
    small = 2 if c >= 32 else 4  # warps: two multiply TF32 without a transposed copy
    return Tile(min(m, 64) if c >= 32 else m, min(n, 64), 32, small, 3 if c >= 32 else 2)


def _channels_last(x: Tensor) -> Tensor:
    """x [clients, n, c, h, w] as [clients, n, h, w, c], dense but for the step between clients."""
    x = x.permute(0, 1, 3, 4, 2)
    if x[0].is_contiguous():
        return x
    if x.stride(0) == 0:
        return x[:1].contiguous().expand(x.shape)
    return x.contiguous()


def _taps_first(w: Tensor) -> Tensor:
    """w [clients, o, c, kh, kw] as [clients, o, kh, kw, c], dense as above."""
    last = w.permute(0, 1, 3, 4, 2)
    if last[0].is_contiguous():
        return last
    if w.shape[0] > 1 and w.stride(0) == 0:
        return _taps_first(w[:1].contiguous()).expand(last.shape)
    out: Tensor = transpose(w.contiguous().flatten(3))
    return out.reshape(last.shape)


def _precision() -> str:
    chosen = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return "tf32" if chosen == "tf32" else "ieee"
