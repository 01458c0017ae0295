"""Networks for f and h1, by name.

Bring your own: `flowdup.register_model("my-net", factory)`, where factory(shape, outputs) returns
an `nn.Module` from inputs [n, *shape] to [n, outputs].  The same name serves as f (outputs =
classes) and as h1 (outputs = width of the embedding).
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flowdup.errors import ConfigError, shorten
from flowdup.memory import check_memory
from flowdup.models.cnn import cnn, cnn_mcmahan, cnn_small, mlp
from flowdup.models.context import WithContext
from flowdup.models.network import Factory, Network, Weights
from flowdup.models.resnet import resnet18, resnet18_imagenet
from flowdup.registry import Registry

__all__ = [
    "MODELS",
    "Network",
    "Weights",
    "build_network",
    "context_name",
    "own_shapes",
    "register_model",
]

MODELS: Registry[Factory] = Registry(
    "model",
    {
        "cnn": cnn,
        "cnn-mcmahan": cnn_mcmahan,
        "cnn-small": cnn_small,
        "mlp": mlp,
        "resnet18": resnet18,
        "resnet18-imagenet": resnet18_imagenet,
    },
)


def register_model(name: str, factory: Factory) -> None:
    """Make a network available under a name that configurations and checkpoints can use."""
    MODELS.register(name, factory)


def context_name(name: str, channels: int) -> str:
    """What the model is called that reads so many channels besides its input (`context.py`)."""
    return f"{name}+context{channels}"


_WITH_CONTEXT = re.compile(r"(.+)\+context([1-9][0-9]{0,3})")


def build_network(
    name: str,
    shape: tuple[int, ...],
    outputs: int,
    read: Callable[[Tensor], Tensor],
    most_weights: int = 0,
) -> Network:
    """The network of a name; ConfigError if it has more weights than memory, or the limit, allows.

    flowdup's own models are counted before anything is allocated; of a user's, which may not be
    made on a device without memory, only the outputs are.
    """
    factory, _ = _find(name)
    shapes = own_shapes(name, shape, outputs)
    weights = sum(map(math.prod, shapes.values())) if shapes else outputs
    what = f"the model '{name}' with inputs {shorten(shape)} and {shorten(outputs)} outputs"
    remedy = "choose a smaller model, or fewer classes or a narrower embedding"
    check_memory(4 * weights, what, remedy)
    if 0 < most_weights < weights:
        raise ConfigError(f"{what} has {weights:,} weights, more than {most_weights:,}: {remedy}")
    return replace(Network.build(factory, shape, outputs, read), name=name)


def own_shapes(name: str, shape: tuple[int, ...], outputs: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a model of flowdup's own, computed without memory; empty for a user's."""
    factory, definition = _find(name)
    if not getattr(definition, "__module__", "").startswith(f"{__name__}."):
        return {}
    with torch.device("meta"):
        return {n: tuple(p.shape) for n, p in factory(shape, outputs).named_parameters()}


def _find(name: str) -> tuple[Factory, Factory]:
    """A name's factory, and the registered one that it is made of."""
    if isinstance(name, str) and (found := _WITH_CONTEXT.fullmatch(name)):
        base = MODELS.find(found[1])
        return partial(WithContext, base, channels=int(found[2])), base
    return MODELS.find(name), MODELS.find(name)
