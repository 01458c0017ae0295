"""Layers that are fast when `vmap` runs a module for many clients on a GPU.

`for_clients` changes the module that it is given; `models.network.replaced_layers` gives it a copy.
"""

from torch import nn

from flowdup.accelerate import convolution, pooling
from flowdup.accelerate.convolution import ClientConv2d
from flowdup.accelerate.normalization import ClientGroupNorm
from flowdup.accelerate.pooling import ClientMaxPool2d, ClientMean2d

_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: ClientConv2d,
    nn.GroupNorm: ClientGroupNorm,
    nn.MaxPool2d: ClientMaxPool2d,
    nn.AdaptiveAvgPool2d: ClientMean2d,  # on a CPU, too: `vmap` would loop over clients
}


def for_clients(module: nn.Module) -> nn.Module:
    """The module itself, its layers of torch exchanged where ours compute the same.

    Subclasses of torch's layers, which may compute something else, stay.
    """
    for part in module.modules():
        if type(part) in _LAYERS and _is_supported(part):
            part.__class__ = _LAYERS[type(part)]
    return module


def _is_supported(part: nn.Module) -> bool:
    if isinstance(part, nn.Conv2d):
        return convolution.is_supported(part)
    if isinstance(part, nn.AdaptiveAvgPool2d):
        return part.output_size in (1, (1, 1))
    return not isinstance(part, nn.MaxPool2d) or pooling.is_supported(part)
