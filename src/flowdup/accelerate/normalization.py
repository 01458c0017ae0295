"""GroupNorm for a cohort, channels last: one pass over an image gives what its pixels need.

    mean, variance   over a group's channels and pixels
    y = w (x - mean) s + b,  s = 1 / sqrt(variance + eps)

With sums per channel over pixels, gy and x give

    A = mean over the group of w gy        B = mean over the group of w gy (x - mean) s
    gx = s (w gy - A - (x - mean) s B)

so y and gx are products and sums with numbers per image and channel.  y is left to a compiler,
which may add what follows; for gx an image is read twice, so one kernel does both.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp

from flowdup.accelerate.convolution import Dims, clients_as_images
from flowdup.accelerate.dispatch import kernels_for
from flowdup.autograd import apply_function


class ClientGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` for use under `vmap`: `GroupNorm` on a GPU, else torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim == 4 and self.affine and kernels_for(input, self.weight):
            return apply_function(
                GroupNorm, input, self.weight, self.bias, self.num_groups, self.eps
            )
        return super().forward(input)


class GroupNorm(torch.autograd.Function):
    """GroupNorm.apply(x [n, c, h, w], w [c], b [c], groups, eps)"""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
        affine = apply_function(Affine, x, w[None], b[None], groups, eps)  # [n, c, 2]
        factor, shift = affine.unbind(-1)
        return (x * _pixels(factor) + _pixels(shift)).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x, w) = gradients, ctx.saved_tensors
        gx, sums = Gradient.apply(gy, x, w[None], ctx.groups, ctx.eps)  # type: ignore[no-untyped-call]
        gw, gb = sums.sum(0).to(w.dtype).unbind(-1)
        return gx, gw, gb, None, None


class Affine(torch.autograd.Function):
    """Affine.apply(x, w [rows, c], b [rows, c], groups, eps): y = factor x + shift.  # [n, c, 2]

    Each row of w and b belongs to as many images, side by side.  It is never differentiated:
    `GroupNorm` has a gradient of its own.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
        kernels = _kernels(x, groups)
        found: Tensor = (kernels.norm_affine if kernels else _affine)(x, w, b, groups, eps)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, dims: Dims, x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float
    ) -> tuple[Tensor, int]:
        """Clients are more images and more rows."""
        out = apply_function(Affine, *clients_as_images(info, dims, x, w, b), groups, eps)
        return out.reshape(info.batch_size, -1, *out.shape[1:]), 0


class Gradient(torch.autograd.Function):
    """Gradient.apply(gy, x, w [rows, c], groups, eps): gx, and what every image adds to the
    gradients by w and b.  # [n, c, h, w], [n, c, 2]

    Each row of w belongs to as many images, side by side.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(gy: Tensor, x: Tensor, w: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
        kernels = _kernels(x, groups)
        found: tuple[Tensor, Tensor] = (kernels.norm_gradient if kernels else _gradient)(
            gy, x, w, groups, eps
        )
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        def gradient(gy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return _gradient(gy, x, w, ctx.groups, ctx.eps)

        back = vjp(gradient, *ctx.saved_tensors)[1]
        return (*back(gradients), None, None)

    @staticmethod
    def vmap(
        info: Any, dims: Dims, gy: Tensor, x: Tensor, w: Tensor, groups: int, eps: float
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Clients are more images and more rows."""
        tensors = clients_as_images(info, dims, gy, x, w)
        found = Gradient.apply(*tensors, groups, eps)  # type: ignore[no-untyped-call]
        gx, sums = (t.reshape(info.batch_size, -1, *t.shape[1:]) for t in found)
        return (gx, sums), (0, 0)


def _kernels(x: Tensor, groups: int) -> Any:
    """If channels and groups are powers of two, as the sides of Triton's blocks must be."""
    powers = all(n & (n - 1) == 0 for n in (x.shape[1], groups))
    return kernels_for(x) if powers else None


def _pixels(numbers: Tensor) -> Tensor:
    return numbers[..., None, None]


def _rows(w: Tensor, x: Tensor) -> Tensor:
    """That of every image."""  # [n, c]
    return w[:, None].expand(-1, x.shape[0] // w.shape[0], -1).flatten(0, 1)


def _moments(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """mean and s of every channel's group."""  # [n, c] both
    mean = _mean(_sums(x), x, groups)
    variance = _mean(_sums(x, x), x, groups) - mean.square()
    return mean, torch.rsqrt(variance.clamp(min=0) + eps)


def _affine(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
    mean, s = _moments(x, groups, eps)
    factor = s * _rows(w, x)
    return torch.stack([factor, _rows(b, x) - mean * factor], -1)


def _gradient(gy: Tensor, x: Tensor, w: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    w = _rows(w, x)
    mean, s = _moments(x, groups, eps)
    gb = _sums(gy)
    gw = s * (_sums(gy, x) - mean * gb)
    a, b = (s * _mean(w * t, x, groups) for t in (gb, gw))
    gx = gy * _pixels(s * w) - _pixels(a) - (x - _pixels(mean)) * _pixels(s * b)
    return gx.to(x.dtype), torch.stack([gw, gb], -1)


def _sums(x: Tensor, times: Tensor | None = None) -> Tensor:
    """Over pixels, in float32 at least."""  # [n, c]
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide) if times is None else x.to(wide) * times.to(wide)
    return x.sum((2, 3))


def _mean(sums: Tensor, x: Tensor, groups: int) -> Tensor:
    """Of a channel's group, from sums over pixels."""  # [n, c] -> [n, c]
    grid = sums.reshape(sums.shape[0], groups, -1)
    mean = grid.sum(2, keepdim=True) / (grid.shape[2] * x.shape[2] * x.shape[3])
    return mean.expand(grid.shape).flatten(1)
