"""GroupNorm for a cohort: sums over pixels channel by channel, as channels-last images lie.

    mean, variance   over a group's channels and pixels
    y = w (x - mean) / sqrt(variance + eps) + b

torch's own kernel wants a group's channels next to each other, and a copy of images where they are
not.
"""

from typing import Any

import torch
from torch import Tensor, nn

from flowdup.models.convolution import apply, inside_vmap, kernels_for


class ClientGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` that is `group_norm` inside `vmap` on a GPU, else torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim == 4 and self.affine and inside_vmap() and kernels_for(input, self.weight):
            return apply(_GroupNorm, input, self.weight, self.bias, self.num_groups, self.eps)
        return super().forward(input)


class _GroupNorm(torch.autograd.Function):
    """apply(x [n, c, h, w], w [c], b [c], groups, eps)"""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
        mean, scale = _moments(x, groups, eps)
        factor = scale * w  # [n, c]
        return (x * factor[..., None, None] + (b - mean * factor)[..., None, None]).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x, w) = gradients, ctx.saved_tensors
        mean, scale = _moments(x, ctx.groups, ctx.eps)
        sums, products = _sums(gy), _sums(gy, x)  # [n, c]
        along = scale * (products - mean * sums)  # sums of gy times the normalised x
        a, b = (_over_groups(w * t, ctx.groups) / _area(x, ctx.groups) for t in (sums, along))
        tilt = scale.square() * b
        gx = (
            gy * (scale * w)[..., None, None]
            - x * tilt[..., None, None]
            + (mean * tilt - scale * a)[..., None, None]
        )
        return gx.to(x.dtype), along.sum(0).to(w.dtype), sums.sum(0).to(w.dtype), None, None


def _moments(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """mean and 1 / sqrt(variance + eps) of every channel's group."""  # [n, c]
    area = _area(x, groups)
    mean = _over_groups(_sums(x), groups) / area
    variance = _over_groups(_sums(x, x), groups) / area - mean.square()
    return mean, torch.rsqrt(variance.clamp(min=0) + eps)


def _area(x: Tensor, groups: int) -> int:
    return x.shape[1] // groups * x.shape[2] * x.shape[3]


def _sums(x: Tensor, times: Tensor | None = None) -> Tensor:
    """Over pixels, in float32 at least."""  # [n, c]
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide) if times is None else x.to(wide) * times.to(wide)
    return x.sum((2, 3))


def _over_groups(sums: Tensor, groups: int) -> Tensor:
    """Of a channel, the sum over its group."""  # [n, c] -> [n, c]
    grid = sums.reshape(sums.shape[0], groups, -1)
    return grid.sum(2, keepdim=True).expand(grid.shape).flatten(1)
