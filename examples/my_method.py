"""MeanBias: FedAvg's model with a bias of its own, read off the mean of a client's inputs.

A method of your own, in a file anywhere:

    flowdup check examples/my_method.py
    flowdup --import examples/my_method.py train digits --out runs/mine --set method.name=mean-bias

    theta' = theta, but for the last bias b' = b + scale A m(X)         m(X): mean over x in X
    L      = mean over labeled (x, y) of l(y, f(x; theta'))
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import flowdup
from flowdup.methods import Batch, Method, MethodContext, Params
from flowdup.methods.base import mean_loss
from flowdup.params import prefixed, strip_prefix
from flowdup.random import Stream


@dataclass(frozen=True)
class MeanBiasConfig:
    scale: float = 0.1


class MeanBias(Method):
    def __init__(self, config: MeanBiasConfig, context: MethodContext) -> None:
        self.config, self.f = config, context.f
        self.shape = (context.spec.classes, math.prod(context.spec.shape))
        self.bias = [n for n, s in self.f.shapes.items() if s == self.shape[:1]][-1]

    def init(self, stream: Stream) -> Params:
        """What is trained and sent: theta and A."""
        return prefixed("theta.", self.f.init(stream)) | {"A": torch.zeros(self.shape)}

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Params:
        """`present` [n] is 1 for a row of x that is data and 0 for padding."""
        theta = strip_prefix(params, "theta.")
        mean = present @ self.f.read(x).flatten(1) / present.sum().clamp(min=1)
        return theta | {self.bias: theta[self.bias] + self.config.scale * params["A"] @ mean}

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        """On one batch of one client; unlabeled rows have batch.labeled = 0."""
        theta = self.personalize(params, batch.x, batch.present)
        return mean_loss(self.f(theta, batch.x), batch)


flowdup.register_method("mean-bias", MeanBias, MeanBiasConfig)
