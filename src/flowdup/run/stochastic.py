"""FLowDUP as a stochastic predictor, really sampled: what a PAC-Bayes bound speaks of.

    psi_h' ~ N(psi_h, alpha_h I),  v ~ N(clip(h(X; psi_h'), R), alpha_theta I)

The norm of h is clipped to R, so that distances from psi_r are at most R + ||psi_r|| and their mean
can be bounded from samples.  Beware of clipping around psi_r: that has seen labels, and would have
to be paid for as psi_h is.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from flowdup.accelerate.layers import for_clients
from flowdup.data import ClientData
from flowdup.errors import CertificateError
from flowdup.methods.base import Method
from flowdup.methods.flowdup import FLowDUP
from flowdup.models.network import replaced_layers
from flowdup.params import Params
from flowdup.random import Stream

_NUMBERS = 2**27  # of hypernetworks and models that are sampled at once
_POINTS = 10_000  # that go through them


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

    def clipped_distance_squared(self, radius_squared: float, psi_r_squared: float) -> float:
        """What `distance_squared` becomes if the norm of v's mean is clipped to a smaller R: of
        c v from psi_r, where 2 <v, psi_r> = ||v||^2 + ||psi_r||^2 - ||v - psi_r||^2.
        """
        if self.norm_squared <= radius_squared:
            return self.distance_squared
        c = math.sqrt(radius_squared / self.norm_squared)
        product = self.norm_squared + psi_r_squared - self.distance_squared
        return max(c**2 * self.norm_squared - c * product + psi_r_squared, 0.0)


class StochasticPredictor:
    """Samples of it, many at once; its noise comes from a generator of its own."""

    def __init__(self, method: Method, psi: Params, stream: Stream, random: str = "h") -> None:
        """`random`: which parameters are, "h" for all of the hypernetwork's, "h2" for its head."""
        self.method, self.psi = as_flowdup(method), psi
        self.names = [n for n in psi if n.startswith(random)]
        self.choice = np.random.default_rng([*stream.key])  # of clients
        like = next(iter(psi.values()))
        low, high = stream.key
        self.noise = torch.Generator(like.device).manual_seed(low + (high << 32))
        self.psi_r = psi.get("psi_r", like.new_zeros(self.method.subspace.k))
        own = sum(psi[n].numel() for n in self.names) + self.method.f.size
        self.at_once = max(_NUMBERS // own, 1)

    def samples(self, clients: Sequence[ClientData], noise: Noise, draws: int) -> list[Sample]:
        """Of clients that are drawn at random with each: their mean is the predictor's risk."""
        chosen = self.choice.integers(len(clients), size=draws)
        return self.sample([clients[i] for i in chosen], noise)

    def distances(self, clients: Sequence[ClientData], noise: Noise, draws: int) -> list[float]:
        """Squared distances of models from psi_r, at clients drawn at random, labeled or not."""
        chosen = self.choice.integers(len(clients), size=draws)
        found = self._drawn([clients[i] for i in chosen], noise, predicts=False)
        return [d for _, mean, _ in found for d in self._distances(mean)]

    def sample(self, clients: Sequence[ClientData], noise: Noise) -> list[Sample]:
        """For each client one hypernetwork and one model, both drawn anew; the largest come first.

        A client may be named several times.
        """
        found: list[Sample] = []
        for group, mean, answers in self._drawn(clients, noise, predicts=True):
            wrong = [
                float((own[: len(c)] != c.labels)[c.labels >= 0].double().mean())
                for own, c in zip(answers.cpu(), group, strict=True)
            ]
            norms = mean.square().sum(1).tolist()
            found += map(Sample, wrong, self._distances(mean), norms)
        return found

    def _distances(self, mean: Tensor) -> list[float]:
        distances: list[float] = (mean - self.psi_r).square().sum(1).tolist()
        return distances

    def _drawn(
        self, clients: Sequence[ClientData], noise: Noise, predicts: bool
    ) -> Iterator[tuple[list[ClientData], Tensor, Tensor]]:
        """Clients, means of v [clients, k] and, if asked for, predicted classes [clients, points]
        of padded points.
        """

        def one(own: Params, x: Tensor, present: Tensor, around: Tensor) -> tuple[Tensor, Tensor]:
            mean = self.method.h(self.psi | own, x, present)
            norm = mean.norm().clamp(min=torch.finfo(mean.dtype).tiny)
            mean = mean * (math.sqrt(noise.radius_squared) / norm).clamp(max=1)
            if not predicts:
                return mean, mean.new_zeros(0)
            return mean, self.method.f(self.method.subspace(mean + around), x).argmax(-1)

        for group in self._groups(clients):
            x = pad_sequence([c.x for c in group], batch_first=True).to(self.psi_r.device)
            sizes = torch.tensor([len(c) for c in group], device=x.device)
            present = (torch.arange(x.shape[1], device=x.device) < sizes[:, None]).to(self.psi_r)
            own = {n: self._around(self.psi[n], len(group), noise.alpha_h) for n in self.names}
            zero = torch.zeros_like(self.psi_r)
            v = self._around(zero, len(group) if predicts else 1, noise.alpha_theta)
            with torch.no_grad(), replaced_layers(for_clients):
                means, answers = vmap(one)(own, x, present, v.expand(len(group), -1))
            yield group, means, answers

    def _groups(self, clients: Sequence[ClientData]) -> Iterator[list[ClientData]]:
        """In groups of like size, the largest first."""
        group: list[ClientData] = []
        for client in sorted(clients, key=len, reverse=True):
            most = min(self.at_once, max(_POINTS // len(group[0]), 1)) if group else 1
            if len(group) >= most:
                yield group
                group = []
            group.append(client)
        if group:
            yield group

    def _around(self, mean: Tensor, count: int, variance: float) -> Tensor:
        """So many samples of N(mean, variance I)."""
        drawn = torch.randn(
            (count, *mean.shape), generator=self.noise, dtype=mean.dtype, device=mean.device
        )
        return mean + drawn * math.sqrt(variance)


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
