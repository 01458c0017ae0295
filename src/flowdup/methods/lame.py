"""LAME: the FedAvg model, whose predictions of a client's points are corrected together.

Boudiaf, Mueller, Ben Ayed, Bertinetto, "Parameter-free Online Test-time Adaptation", CVPR 2022, on
the model of FedAvg: points that look alike to the model should get the same class.

    p_i = softmax f(x_i; theta)
    N_i = the `neighbors` points of X, but for x_i, whose features have the largest cosine with
          those of x_i; features are the inputs of f's last layer
    y_i = softmax(log p_i + sum over j in N_i of y_j)       `steps` times for all i, from y_i = p_i

A point q that is asked for gets log p(q) + sum over j in N(q) of y_j for logits, with y of the
unlabeled set X, its neighbours among X and nothing of the other points that are asked for.  A point
of X that is itself in question (known by a cosine of 1) is left out of its neighbours, as in the
fixed point above.  Training and what is sent are FedAvg's.

`neighbors` is worth a search: the more of a client's points share a class, the more neighbours
help, and the fewer do, the more they harm.  The default is the source's.

The result is no set of weights: `personalize` gives the model of FedAvg, uncorrected.

Departures: the source corrects one batch of a stream at a time, here it is the client's whole set;
it stops once its objective settles, here all `steps` are taken, which then change nothing.  Of its
affinities (k nearest neighbours, radial, linear) this is the first.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, normalize

from flowdup.methods.base import NoSettings
from flowdup.methods.context import MethodContext
from flowdup.methods.features import FeatureModel
from flowdup.methods.fedavg import FedAvg
from flowdup.params import Params
from flowdup.settings import check_range

_SAME = 1 - 1e-5  # a cosine above which a neighbour is the point itself


@dataclass(frozen=True)
class LAMEConfig:
    """Settings of `lame`."""

    neighbors: int = 5  # points that look most alike, whose predictions count for a point
    steps: int = 100  # of the correction of all points together
    chunk: int = 2048  # points that pass through f, or are compared with all others, at once

    def __post_init__(self) -> None:
        check_range("method.neighbors", self.neighbors, 1)
        check_range("method.steps", self.steps, 0)
        check_range("method.chunk", self.chunk, 1)


class Points(NamedTuple):
    """Predictions for the points of a set, and features."""

    log_p: Tensor  # [n, classes]
    features: Tensor  # [n, width], of length 1


class Neighbors(NamedTuple):
    """The nearest points of every point, and which of them count."""

    rows: Tensor  # [m, k + 1], of the support
    weight: Tensor  # [m, k + 1], 1 or 0

    def sum(self, y: Tensor) -> Tensor:
        """Of y [n, classes] over the neighbours."""  # [m, classes]
        return (self.weight[:, :, None] * y[self.rows]).sum(1)


class LAME(FedAvg):
    """FedAvg's training, and predictions of all points together; see the file's docstring."""

    predicts_jointly = True

    def __init__(self, config: LAMEConfig, context: MethodContext) -> None:
        super().__init__(NoSettings(), context)
        self.config = config
        self.model = FeatureModel.of(context.f, context)

    def logits(self, params: Params, x: Tensor, present: Tensor, query: Tensor) -> Tensor:
        support, asked = self._read(params, x), self._read(params, query)
        y = self.assignments(support, present)
        return asked.log_p + self.neighbors(asked, support, present).sum(y)

    def assignments(self, support: Points, present: Tensor) -> Tensor:
        """y, the classes of the unlabeled set, found together."""  # [n, classes]
        neighbors = self.neighbors(support, support, present)
        y = support.log_p.exp()
        for _ in range(self.config.steps):
            y = (support.log_p + neighbors.sum(y)).softmax(1)
        return y

    def _read(self, params: Params, x: Tensor) -> Points:
        chunks = [self.model.features(params, rows) for rows in torch.split(x, self.config.chunk)]
        features = torch.cat(chunks)
        return Points(
            log_softmax(self.model.logits(params, features), 1), normalize(features, dim=1)
        )

    def neighbors(self, of: Points, among: Points, present: Tensor) -> Neighbors:
        """One more than asked for, of which the first does not count if it is the point itself and
        the last does not otherwise.
        """
        k = self.config.neighbors
        count = min(k + 1, among.features.shape[0])
        rank = torch.arange(count, device=present.device)
        parts = []
        for some in torch.split(of.features, self.config.chunk):
            cosine = some @ among.features.T  # [some, n]
            cosine = torch.where(present > 0, cosine, -math.inf)
            nearest = cosine.topk(count, dim=1)
            first = among.features[nearest.indices[:, 0]]
            own = (some * first).sum(1, keepdim=True) > _SAME  # not by TF32's products, as above
            counted = torch.where(own, rank > 0, rank < k) & (nearest.values > -math.inf)
            parts.append((nearest.indices, counted.to(present.dtype)))
        rows, weight = (torch.cat(both) for both in zip(*parts, strict=True))
        return Neighbors(rows, weight)
