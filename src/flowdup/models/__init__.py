"""Networks for f and h1, by name.

Bring your own: `flowdup.register_model("my-net", factory)`, where factory(shape, outputs) returns
an `nn.Module` from inputs [n, *shape] to [n, outputs].  The same name serves as f (outputs =
classes) and as h1 (outputs = width of the embedding).
"""

from collections.abc import Callable

from torch import Tensor

from flowdup.models.cnn import cnn, cnn_mcmahan, cnn_small, mlp
from flowdup.models.network import Factory, Network, Weights
from flowdup.models.resnet import resnet18
from flowdup.registry import Registry

__all__ = ["MODELS", "Network", "Weights", "build_network", "register_model"]

MODELS: Registry[Factory] = Registry(
    "model",
    {
        "cnn": cnn,
        "cnn-mcmahan": cnn_mcmahan,
        "cnn-small": cnn_small,
        "mlp": mlp,
        "resnet18": resnet18,
    },
)


def register_model(name: str, factory: Factory) -> None:
    """Make a network available under a name that configurations and checkpoints can use."""
    MODELS.register(name, factory)


def build_network(
    name: str, shape: tuple[int, ...], outputs: int, read: Callable[[Tensor], Tensor]
) -> Network:
    return Network.build(MODELS.find(name), shape, outputs, read)
