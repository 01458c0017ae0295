"""Networks for f and h1, by name.

Bring your own: `flowdup.register_model("my-net", factory)`, where factory(shape, outputs) returns
an `nn.Module` from inputs [n, *shape] to [n, outputs].  The same name serves as f (outputs =
classes) and as h1 (outputs = width of the embedding).
"""

import importlib
import sys
from collections.abc import Callable, Sequence

from torch import Tensor

from flowdup.errors import ConfigError
from flowdup.models.cnn import cnn, cnn_mcmahan, cnn_small, mlp
from flowdup.models.network import Factory, Network, Weights
from flowdup.models.resnet import resnet18

__all__ = [
    "Network",
    "Weights",
    "build_network",
    "import_models",
    "model_names",
    "register_model",
]

_FACTORIES: dict[str, Factory] = {
    "cnn": cnn,
    "cnn-mcmahan": cnn_mcmahan,
    "cnn-small": cnn_small,
    "mlp": mlp,
    "resnet18": resnet18,
}


def register_model(name: str, factory: Factory) -> None:
    """Make a network available under a name that configurations and checkpoints can use."""
    if name in _FACTORIES and _FACTORIES[name] is not factory:
        raise ConfigError(f"a model named '{name}' exists already: choose another name")
    _FACTORIES[name] = factory


def import_models(modules: Sequence[str]) -> None:
    """Import modules of the user's, which register models."""
    sys.path.insert(0, "")
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a user's module may raise
            raise ConfigError(
                f"--import {module} failed with {error!r}: mend the module"
            ) from error


def model_names() -> list[str]:
    return sorted(_FACTORIES)


def build_network(
    name: str, shape: tuple[int, ...], outputs: int, read: Callable[[Tensor], Tensor]
) -> Network:
    if name not in _FACTORIES:
        raise ConfigError(
            f"unknown model '{name}': use one of {', '.join(model_names())}, or name the module "
            "that registers it with --import"
        )
    return Network.build(_FACTORIES[name], shape, outputs, read)
