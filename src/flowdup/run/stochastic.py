"""FLowDUP as a stochastic predictor, really sampled: what a PAC-Bayes bound speaks of.

    psi_h' ~ N(psi_h, alpha_h I),  v ~ N(clip(h(X; psi_h'), R), alpha_theta I)

The norm of h is clipped to R, so that distances from psi_r are at most R + ||psi_r|| and their mean
can be bounded from samples.  Beware of clipping around psi_r: that has seen labels, and would have
to be paid for as psi_h is.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowdup.data import ClientData
from flowdup.errors import CertificateError
from flowdup.methods.base import Method
from flowdup.methods.flowdup import FLowDUP
from flowdup.params import Params
from flowdup.random import Stream


class Noise(NamedTuple):
    """Variances, and how far from 0 the mean of v may be."""

    alpha_h: float
    alpha_theta: float
    radius_squared: float


class Sample(NamedTuple):
    """A sampled predictor at one client."""

    error: float  # the share of its points that are wrong
    distance_squared: float  # of the mean of v from psi_r
    norm_squared: float  # of the mean of v


class StochasticPredictor:
    """Samples of it, from a stream of its own."""

    def __init__(self, method: Method, psi: Params, stream: Stream, random: str = "h") -> None:
        """`random`: which parameters are, "h" for all of the hypernetwork's, "h2" for its head."""
        self.method, self.psi = as_flowdup(method), psi
        self.names = [n for n in psi if n.startswith(random)]
        self.draw = np.random.default_rng([*stream.key])
        like = next(iter(psi.values()))
        self.psi_r = psi.get("psi_r", like.new_zeros(self.method.subspace.k))

    @torch.no_grad()
    def sample(self, client: ClientData, noise: Noise) -> Sample:
        """One hypernetwork, and one model of this client, both drawn anew."""
        mean = self._mean(client, noise)
        v = mean + self._noise(mean, noise.alpha_theta)
        x = client.x.to(v.device)
        answers = self.method.f(self.method.subspace(v), x).argmax(1).cpu()
        known = client.labels >= 0
        error = float((answers != client.labels)[known].double().mean())
        return Sample(error, self._distance(mean), float(mean.square().sum()))

    def _distance(self, mean: Tensor) -> float:
        return float((mean - self.psi_r).square().sum())

    def _mean(self, client: ClientData, noise: Noise) -> Tensor:
        """Of v, by a new hypernetwork, clipped."""
        psi = self.psi | {
            n: self.psi[n] + self._noise(self.psi[n], noise.alpha_h) for n in self.names
        }
        x = client.x.to(self.psi_r.device)
        mean = self.method.h(psi, x, torch.ones(len(client), device=x.device))
        squared = float(mean.square().sum())
        factor = math.sqrt(noise.radius_squared / squared) if squared > 0 else 1.0
        return mean * min(factor, 1.0)

    @torch.no_grad()
    def distances(self, clients: Sequence[ClientData], noise: Noise, draws: int) -> list[float]:
        """Squared distances of models from psi_r, at clients drawn at random, labeled or not."""
        chosen = self.draw.integers(len(clients), size=draws)
        return [self._distance(self._mean(clients[i], noise)) for i in chosen]

    def samples(self, clients: Sequence[ClientData], noise: Noise, draws: int) -> list[Sample]:
        """Of clients that are drawn at random with each: their mean is the predictor's risk."""
        chosen = self.draw.integers(len(clients), size=draws)
        return [self.sample(clients[i], noise) for i in chosen]

    def _noise(self, like: Tensor, variance: float) -> Tensor:
        drawn = self.draw.standard_normal(like.numel(), np.float32)
        return torch.from_numpy(drawn).to(like).view_as(like) * math.sqrt(variance)


def as_flowdup(method: Method) -> FLowDUP:
    """The method, if the paper's bound is about it."""
    if type(method) is not FLowDUP:
        raise CertificateError(
            "the paper's bound is about the method 'flowdup' without a correction: train that, or "
            "use the routes held-out-clients, client-quantile and prediction-sets"
        )
    return method


def squared_distance(a: Params, b: Params, prefix: str) -> float:
    """||a - b||^2 over parameters whose names start so, in float64."""
    return sum(
        float((a[n].double() - b[n].double()).square().sum()) for n in a if n.startswith(prefix)
    )
