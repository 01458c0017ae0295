"""ResNet18 (He et al. 2016) with GroupNorm, for small images and for large ones.

Batch statistics do not belong to one client and are not averaged, so every norm is a GroupNorm.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import relu

from flowdup.data.tensors import channels_last_sentence, looks_channels_last
from flowdup.errors import ConfigError


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(min(32, channels), channels)


class Block(nn.Module):
    """A residual block of two convolutions, with GroupNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps [n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        out = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def resnet18(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """For small images: a first convolution of 3x3, no pooling after it.

    d = 11,173,962 on 3x32x32 with 10 classes.
    """
    return _resnet18(shape, outputs, partial(nn.Conv2d, kernel_size=3, padding=1), [])


def resnet18_imagenet(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """As He et al. have it: a first convolution of 7x7 and pooling, which leave a sixteenth of the
    pixels.

    d = 11,181,642 on 3x32x32 with 10 classes.
    """
    first = partial(nn.Conv2d, kernel_size=7, stride=2, padding=3)
    return _resnet18(shape, outputs, first, [nn.MaxPool2d(3, 2, padding=1)])


def _resnet18(
    shape: tuple[int, ...],
    outputs: int,
    first: Callable[..., nn.Module],
    pooling: list[nn.Module],
) -> nn.Module:
    if len(shape) != 3:
        raise ConfigError(f"a ResNet18 reads images [channels, height, width], not shape {shape}")
    if looks_channels_last(shape):
        raise ConfigError(channels_last_sentence(shape))
    layers = [first(shape[0], 64, bias=False), _norm(64), nn.ReLU(), *pooling]
    width = 64
    for stage in (64, 128, 256, 512):
        for stride in (1 if stage == 64 else 2, 1):
            layers.append(Block(width, stage, stride))
            width = stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs))
