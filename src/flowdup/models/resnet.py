"""ResNet18 (He et al. 2016) for small images: 3x3 stem, no first pooling, GroupNorm.

Batch statistics do not belong to one client and are not averaged, so every norm is a GroupNorm.
"""

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
    """d = 11,173,962 on 3x32x32 with 10 classes."""
    if len(shape) != 3:
        raise ConfigError(f"resnet18 reads images [channels, height, width], not shape {shape}")
    if looks_channels_last(shape):
        raise ConfigError(channels_last_sentence(shape))
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], 64, 3, padding=1, bias=False),
        _norm(64),
        nn.ReLU(),
    ]
    width = 64
    for stage in (64, 128, 256, 512):
        for stride in (1 if stage == 64 else 2, 1):
            layers.append(Block(width, stage, stride))
            width = stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs))
