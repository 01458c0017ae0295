"""The hypernetwork h(X) = h2(r(X)) with r(X) = mean of h1(x) over x in X (paper, eq. 3)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, relu

from flowdup.errors import ConfigError
from flowdup.models.network import Network, Weights
from flowdup.params import Params, prefixed, strip_prefix
from flowdup.random import Stream
from flowdup.rank_one import apply
from flowdup.settings import check_range

_LEAST = 1e-6  # variance, so that its root has a gradient


@dataclass(frozen=True)
class HypernetworkConfig:
    """Settings of `method.hypernetwork`: the networks h1 and h2."""

    backbone: str = ""  # a model's name for h1; empty: the same as f
    embedding: int = 256  # numbers that h1 makes of an input
    hidden: int = 100  # the width of the hidden layers of h2
    layers: int = 1  # hidden layers of h2
    pooling: str = "mean"  # of h1 over a set; or mean-std: the deviation of every feature as well
    normalize: bool = True  # LayerNorm of r(X) before h2
    output_scale: float = 0.01  # of h2's last layer at the start, so that v starts near 0
    chunk: int = 2048  # inputs that pass through h1 at once
    h1_lr_scale: float = 1.0  # what server.optimizer.lr is multiplied by for h1

    def __post_init__(self) -> None:
        for name in ("embedding", "hidden", "chunk"):
            check_range(f"method.hypernetwork.{name}", getattr(self, name), 1)
        check_range("method.hypernetwork.layers", self.layers, 1, 1000)
        check_range("method.hypernetwork.h1_lr_scale", self.h1_lr_scale, 0)
        if self.pooling not in ("mean", "mean-std"):
            raise ConfigError(
                f"method.hypernetwork.pooling is 'mean' or 'mean-std', not '{self.pooling}'"
            )

    @property
    def width(self) -> int:
        """Of r(X)."""
        return self.embedding * (2 if self.pooling == "mean-std" else 1)

    def head_size(self, k: int) -> int:
        """How many weights h2 has."""
        inner = (self.layers - 1) * (self.hidden + 1) * self.hidden
        return (self.width + 1) * self.hidden + inner + (self.hidden + 1) * k


class Hypernetwork:
    """Pure functions of `params`, whose names start with `h1.` and `h2.`.

    A set may have any size; `present` [n] marks with 1 the rows that belong to it, with 0 padding.
    The set passes through h1 in chunks, so only its embedding has to fit in memory: x may be a
    tensor over a memory-mapped file.
    """

    def __init__(
        self, config: HypernetworkConfig, h1: Network, k: int, start: Weights | None = None
    ) -> None:
        self.config, self.h1, self.k, self.start = config, h1, k, start or {}

    def init(self, stream: Stream) -> Params:
        """h1 begins from the weights in `start` whose names and shapes it has: with the model's own
        architecture, all but the last layer.
        """
        inputs, hidden = self.config.width, self.config.hidden
        h1 = self.h1.init(stream.child("h1"))
        h1 |= {n: w for n, w in self.start.items() if n in h1 and h1[n].shape == w.shape}
        params = prefixed("h1.", h1)
        for name in self._hidden():
            params[f"{name}.weight"] = _uniform(stream.child(name), hidden, inputs, 1.0)
            params[f"{name}.bias"] = torch.zeros(hidden)
            inputs = hidden
        scale = self.config.output_scale
        params["h2.output.weight"] = _uniform(stream.child("h2.output"), self.k, hidden, scale)
        params["h2.output.bias"] = torch.zeros(self.k)
        return params

    @property
    def matrices(self) -> tuple[str, ...]:
        """Parameters that meet one vector per set: h2's matrices."""
        return tuple(f"{name}.weight" for name in (*self._hidden(), "h2.output"))

    @property
    def lr_scales(self) -> tuple[tuple[str, float], ...]:
        """What the server's learning rate is multiplied by, by prefix."""
        return (("h1.", self.config.h1_lr_scale),)

    def _hidden(self) -> list[str]:
        """The names of h2's hidden layers."""
        return ["h2.hidden", *(f"h2.hidden-{i}" for i in range(2, self.config.layers + 1))]

    def embedding(self, params: Params, x: Tensor, present: Tensor) -> Tensor:
        """r(X) = (1 / |X|) sum over x in X of h1(x); with "mean-std" also the deviations."""
        h1 = strip_prefix(params, "h1.")
        chunks = zip(*(torch.split(t, self.config.chunk) for t in (x, present)), strict=True)
        features = ((self.h1(h1, rows), here) for rows, here in chunks)
        return self.pool(features)

    def pool(self, features: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Chunks of h1(x) [n, embedding], with what is present, as one r(X) [width]."""
        spread = self.config.pooling == "mean-std"
        powers = ((torch.cat([z, z.square()], 1) if spread else z, here) for z, here in features)
        sums = ((here.sum(), here @ z) for z, here in powers)
        points, total = reduce(lambda a, b: (a[0] + b[0], a[1] + b[1]), sums)
        moments = total / points.clamp(min=1)
        if not spread:
            return moments
        mean, squares = moments.chunk(2)
        return torch.cat([mean, (squares - mean.square()).clamp(min=_LEAST).sqrt()])

    def head(self, params: Params, r: Tensor) -> Tensor:
        """v = h2(r)."""  # [k]
        if self.config.normalize:
            r = layer_norm(r, r.shape[-1:])
        for name in self._hidden():
            r = relu(apply(params[f"{name}.weight"], r, params[f"{name}.bias"]))
        return apply(params["h2.output.weight"], r, params["h2.output.bias"])

    def __call__(self, params: Params, x: Tensor, present: Tensor) -> Tensor:
        return self.head(params, self.embedding(params, x, present))


def _uniform(stream: Stream, rows: int, columns: int, scale: float) -> Tensor:
    bound = np.float32(scale * math.sqrt(6.0 / columns))
    return torch.from_numpy(stream.uniform(rows * columns) * bound).reshape(rows, columns)
