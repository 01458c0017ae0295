"""Max-pooling for a cohort, by windows that do not overlap: no indices, nothing scattered.

y = max over a window of x        gx = gy at the first x of the window that is y, else 0
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flowdup.models.convolution import Pair, apply, inside_vmap, kernels_for


class ClientMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` that is `_MaxPool` inside `vmap` on a GPU, else torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        window = _pair(self.kernel_size)
        large = all(side >= w for side, w in zip(input.shape[-2:], window, strict=True))
        if input.ndim == 4 and large and inside_vmap() and kernels_for(input):
            return apply(_MaxPool, input, window)
        out: Tensor = super().forward(input)
        return out


class _MaxPool(torch.autograd.Function):
    """apply(x [n, c, h, w], window) -> [n, c, h // height, w // width]"""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, window: Pair) -> Tensor:
        return _windows(x, window).amax((3, 5))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.window = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x,) = gradients, ctx.saved_tensors
        height, width = ctx.window
        windows = _windows(x, ctx.window)
        y = windows.amax((3, 5))
        parts, found = [], torch.zeros_like(y, dtype=torch.bool)
        for i in range(height):
            for j in range(width):
                hit = (windows[:, :, :, i, :, j] == y) & ~found
                found = found | hit
                parts.append(torch.where(hit, gy, 0))
        grid = torch.stack(parts, -1).reshape(*y.shape, height, width)  # [n, c, oh, ow, ., .]
        gx = grid.permute(0, 1, 2, 4, 3, 5).reshape(*x.shape[:2], *_covered(x, ctx.window))
        down, right = (a - b for a, b in zip(x.shape[2:], gx.shape[2:], strict=True))
        return pad(gx, (0, right, 0, down)), None


def is_plain(part: nn.MaxPool2d) -> bool:
    """Whether windows lie side by side, and nothing else is asked for."""
    window, nothing = _pair(part.kernel_size), (_pair(part.padding), _pair(part.dilation))
    together = _pair(part.stride) == window and nothing == ((0, 0), (1, 1))
    return together and not part.ceil_mode and not part.return_indices


def _pair(size: int | tuple[int, ...]) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _covered(x: Tensor, window: Pair) -> Pair:
    """The part of an image that whole windows cover."""
    return x.shape[2] // window[0] * window[0], x.shape[3] // window[1] * window[1]


def _windows(x: Tensor, window: Pair) -> Tensor:
    """[n, c, oh, height, ow, width]"""
    (height, width), (h, w) = window, _covered(x, window)
    return x[:, :, :h, :w].reshape(*x.shape[:2], h // height, height, w // width, width)
