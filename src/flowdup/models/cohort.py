"""Modules whose layers are fast when `vmap` runs them for many clients on a GPU, and back again."""

from torch import nn

from flowdup.models.convolution import ClientConv2d, is_plain
from flowdup.models.normalization import ClientGroupNorm

_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: ClientConv2d,
    nn.GroupNorm: ClientGroupNorm,
}


def for_clients(module: nn.Module) -> nn.Module:
    """The same module with layers ready for `vmap` over clients."""
    return _exchange(module, _LAYERS)


def ordinary(module: nn.Module) -> nn.Module:
    """The same module with torch's layers again."""
    return _exchange(module, {own: torchs for torchs, own in _LAYERS.items()})


def _exchange(module: nn.Module, layers: dict[type[nn.Module], type[nn.Module]]) -> nn.Module:
    for part in module.modules():
        if type(part) in layers and (not isinstance(part, nn.Conv2d) or is_plain(part)):
            part.__class__ = layers[type(part)]
    return module
