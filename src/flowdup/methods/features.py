"""A model without its last layer: features, of which its logits are a linear function."""

import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flowdup.errors import ConfigError
from flowdup.methods.context import MethodContext
from flowdup.models.network import Network, Weights
from flowdup.random import Stream


class FeatureModel(NamedTuple):
    """`features(theta, x)`: the input of f's last layer, [n, width], theta the weights of f."""

    features: Network
    output: nn.Linear  # the last layer, as it is defined
    name: str  # of that layer in f

    @classmethod
    def of(cls, f: Network, context: MethodContext) -> "FeatureModel":
        """Of a context's network; ConfigError if that ends in anything but a linear layer."""
        found, exact = _split(f), replace(f, compute=None)
        if found is None or not _is_exact(_split(exact), exact, context):
            raise ConfigError(
                f"the model '{context.model}' has no linear layer at its end, which this method "
                "needs: choose another model or method"
            )
        return found

    @property
    def weight(self) -> str:
        """The name of the last layer's matrix in f."""
        return self._parameter("weight")

    @property
    def bias(self) -> str:
        """And of its bias; ConfigError if it has none."""
        if self.output.bias is None:
            raise ConfigError("the model's last layer has no bias, which this needs: give it one")
        return self._parameter("bias")

    def logits(self, theta: Weights, features: Tensor) -> Tensor:
        """The last layer's answer to features."""
        bias = None if self.output.bias is None else theta[self._parameter("bias")]
        return nn.functional.linear(features, theta[self._parameter("weight")], bias)

    def _parameter(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


class _Omitted(nn.Module):
    """Has a layer's parameters, so that a model's weights still fit, and hands its input on."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return x


def _split(f: Network) -> FeatureModel | None:
    layers = [(n, m) for n, m in f.module.named_modules() if isinstance(m, nn.Linear)]
    if not layers:
        return None
    name, output = layers[-1]
    module: nn.Module = copy.deepcopy(f.module)
    if name:
        module.set_submodule(name, _Omitted(output))
    else:
        module = _Omitted(output)
    network = Network(module, f.inputs, f.read, f.shapes, f.deviations, f.constants, f.compute)
    return FeatureModel(network, output, name)


def _is_exact(found: FeatureModel | None, f: Network, context: MethodContext) -> bool:
    """Whether features and last layer give f's logits, tried with random weights and inputs."""
    if found is None:
        return False
    draw = Stream(0)
    theta = {
        n: w.to(context.device, context.dtype)
        + 0.1
        * torch.from_numpy(draw.child(n).uniform(w.numel()))
        .reshape(w.shape)
        .to(context.device, context.dtype)
        for n, w in f.init(draw).items()
    }
    x = torch.from_numpy(draw.child("x").integers(2 * _size(f.inputs), 256))
    x = x.reshape(2, *f.inputs).to(getattr(torch, context.spec.dtype))
    wanted = f(theta, x)
    try:
        features = found.features(theta, x)
    except RuntimeError:  # layers after it need what it gives, not what it takes
        return False
    if features.ndim != 2 or features.shape[1] != found.output.in_features:
        return False
    return torch.allclose(found.logits(theta, features), wanted, rtol=1e-3, atol=1e-3)


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
