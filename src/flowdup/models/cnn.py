"""Small networks: McMahan's two-convolution layout in three sizes, and a perceptron."""

import math

from torch import nn

from flowdup.data.tensors import channels_last_sentence, looks_channels_last
from flowdup.errors import ConfigError


def _two_convolutions(
    shape: tuple[int, ...],
    outputs: int,
    channels: tuple[int, int],
    kernel: int,
    hidden: int,
    same: bool,
) -> nn.Module:
    """conv - pool - conv - pool - linear - linear, with ReLU between.

    ReLU follows the max-pooling, which gives what the usual order gives for a quarter of the work.
    """
    if len(shape) != 3:
        raise ConfigError(
            f"a CNN reads images [channels, height, width], not inputs of shape {shape}: give gray "
            "images a channel, x[:, None] in NumPy, or choose model 'mlp'"
        )
    padding = kernel // 2 if same else 0
    trim = 0 if same else kernel - 1
    sides = [((side - trim) // 2 - trim) // 2 for side in shape[1:]]
    if looks_channels_last(shape, square=min(sides) >= 1):
        raise ConfigError(channels_last_sentence(shape))
    if min(sides) < 1:
        raise ConfigError(
            f"images of {shape[1]}x{shape[2]} are too small for this CNN: use model 'cnn-small'"
        )
    return nn.Sequential(
        nn.Conv2d(shape[0], channels[0], kernel, padding=padding),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(channels[0], channels[1], kernel, padding=padding),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(channels[1] * math.prod(sides), hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """5x5 valid convolutions of 32 and 64, hidden 64: d = 156,810 on 3x32x32 with 10 classes."""
    return _two_convolutions(shape, outputs, (32, 64), 5, hidden=64, same=False)


def cnn_mcmahan(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """5x5 same convolutions of 32 and 64, hidden 512 (McMahan et al. 2017): d = 1,663,370
    on 1x28x28 with 10 classes.
    """
    return _two_convolutions(shape, outputs, (32, 64), 5, hidden=512, same=True)


def cnn_small(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """3x3 same convolutions of 16 and 32, hidden 64: for images from 4x4 on."""
    return _two_convolutions(shape, outputs, (16, 32), 3, hidden=64, same=True)


def mlp(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Two hidden layers of 64, for inputs of any shape."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, outputs),
    )
