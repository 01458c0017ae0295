"""Modules whose layers are fast when `vmap` runs them for many clients on a GPU, and back again."""

from torch import nn

from flowdup.models import convolution, pooling
from flowdup.models.convolution import ClientConv2d
from flowdup.models.normalization import ClientGroupNorm
from flowdup.models.pooling import ClientMaxPool2d, ClientMean2d

Layers = dict[type[nn.Module], type[nn.Module]]

_LAYERS: Layers = {
    nn.Conv2d: ClientConv2d,
    nn.GroupNorm: ClientGroupNorm,
    nn.MaxPool2d: ClientMaxPool2d,
    nn.AdaptiveAvgPool2d: ClientMean2d,
}


def for_clients(module: nn.Module) -> nn.Module:
    """The same module with layers ready for `vmap` over clients."""
    return _exchange(module, _LAYERS)


def ordinary(module: nn.Module) -> nn.Module:
    """The same module with torch's layers again."""
    return _exchange(module, {own: torchs for torchs, own in _LAYERS.items()})


def _exchange(module: nn.Module, layers: Layers) -> nn.Module:
    for part in module.modules():
        if type(part) in layers and _is_plain(part):
            part.__class__ = layers[type(part)]
    return module


def _is_plain(part: nn.Module) -> bool:
    if isinstance(part, nn.Conv2d):
        return convolution.is_plain(part)
    if isinstance(part, nn.AdaptiveAvgPool2d):
        return part.output_size in (1, (1, 1))
    return not isinstance(part, nn.MaxPool2d) or pooling.is_plain(part)
