"""Pooling for a cohort: windows side by side, no indices, nothing scattered.

y = max over a window of x        gx = gy at the first x of its window that is y, else 0
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flowdup.accelerate.convolution import Dims, Pair, clients_as_images
from flowdup.accelerate.dispatch import kernels_for
from flowdup.autograd import apply_function


class ClientMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` for use under `vmap`: `MaxPool` on a GPU, else torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        window = _pair(self.kernel_size)
        large = all(side >= w for side, w in zip(input.shape[-2:], window, strict=True))
        if input.ndim == 4 and large and kernels_for(input):
            return apply_function(MaxPool, input, window)
        out: Tensor = super().forward(input)
        return out


class ClientMean2d(nn.AdaptiveAvgPool2d):
    """`nn.AdaptiveAvgPool2d(1)` for use under `vmap`, which would loop over clients for torch's own
    where channels lie last.
    """

    def forward(self, input: Tensor) -> Tensor:
        return input.mean((-2, -1), keepdim=True)


class MaxPool(torch.autograd.Function):
    """MaxPool.apply(x [n, c, h, w], window) -> [n, c, h // height, w // width]"""

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
        return apply_function(Unpool, gradients[0], *ctx.saved_tensors, ctx.window), None


class Unpool(torch.autograd.Function):
    """Unpool.apply(gy, x, window) -> gx"""

    generate_vmap_rule = False

    @staticmethod
    def forward(gy: Tensor, x: Tensor, window: Pair) -> Tensor:
        if kernels := kernels_for(gy, x):
            out: Tensor = kernels.unpool(gy, x, window)
            return out
        height, width = window
        grid = _first(x, window) * gy[:, :, :, None, :, None]
        gx = grid.reshape(*x.shape[:2], gy.shape[2] * height, gy.shape[3] * width)
        return pad(gx, (0, x.shape[3] - gx.shape[3], 0, x.shape[2] - gx.shape[2]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, x, ctx.window = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ggy = (_first(x, ctx.window) * _windows(gradients[0], ctx.window)).sum((3, 5))
        return ggy, None, None

    @staticmethod
    def vmap(info: Any, dims: Dims, gy: Tensor, x: Tensor, window: Pair) -> tuple[Tensor, int]:
        """Clients are more images."""
        gx = apply_function(Unpool, *clients_as_images(info, dims, gy, x), window)
        return gx.reshape(info.batch_size, -1, *gx.shape[1:]), 0


def is_supported(part: nn.MaxPool2d) -> bool:
    """Whether windows lie side by side, and nothing else is asked for."""
    window, nothing = _pair(part.kernel_size), (_pair(part.padding), _pair(part.dilation))
    tiled = _pair(part.stride) == window and nothing == ((0, 0), (1, 1))
    return tiled and not part.ceil_mode and not part.return_indices


def _pair(size: int | tuple[int, ...]) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _windows(x: Tensor, window: Pair) -> Tensor:
    """Those that lie whole in the image."""  # [n, c, oh, height, ow, width]
    height, width = window
    oh, ow = x.shape[2] // height, x.shape[3] // width
    return x[:, :, : oh * height, : ow * width].reshape(*x.shape[:2], oh, height, ow, width)


def _first(x: Tensor, window: Pair) -> Tensor:
    """1 at the first largest of every window, else 0."""  # [n, c, oh, height, ow, width]
    windows = _windows(x, window)
    flat = windows.transpose(3, 4).flatten(4)  # [n, c, oh, ow, height width]
    largest = flat == flat.amax(4, keepdim=True)
    first = (largest & (largest.cumsum(4) == 1)).to(x.dtype)
    return first.reshape(*flat.shape[:4], *window).transpose(3, 4)
