"""FLUX: several models for all, of which a client gets the one that its points' moments point to.

After Fenoglio et al., "FLUX: Efficient Descriptor-Driven Clustered Federated Learning under
Arbitrary Distribution Shifts", NeurIPS 2025: clients are clustered by a descriptor of their data,
each cluster trains a model of its own, and a new client is matched to one without labels.

    d(X) = mean and standard deviation over x in X of each feature of x
    c(X) = the number of the centroid mu_c nearest to d(X), of `clusters`
    w(X) = the number of the centroid with the least share_c ||d(X) - mu_c||^2
    L    = mean over labeled (x, y) of l(y, f(x; theta_c(X)))
           + centroid_weight / 2 (||d(X) - mu_w(X)||^2 + ||share - onehot(w(X))||^2)

The second line is k-means, learned by the clients as they train, so that no descriptor is ever
sent.  share_c is how often c has won.  Counting it in keeps all centroids in use, where plain
k-means from this start leaves half of them without a client (frequency-sensitive competitive
learning: Ahalt, Krishnamurthy, Chen, Melton, Neural Networks 1990).

Features are the inputs of the last layer of f with random weights from the seed, never trained:
they do not change, so clusters settle, and they keep what a trained model learns to overlook.  (On
digits in four rotations, all classes at each client, k-means in them finds the rotations; with few
classes a client it mixes rotations and classes, and in a trained model's features more so.)  X is
the batch that L is taken on.  All models start equal.

Sent per client and round: all C models, centroids and shares down and their updates up, 4 C (d + 2
e + 1) bytes each, e the number of features.  (A client could be sent its own model alone, once it
knows its cluster.)  Only labeled clients train.

Departures: the source sends descriptors of all clients to the server, which clusters them once by a
density-based algorithm that finds the number of clusters; while training, its descriptors also hold
moments for every class, and they are of a trained model's features, reduced in dimension.  Here a
client's cluster may change from batch to batch, and the server takes the mean of updates over the
whole cohort, so a model moves by its cluster's share of it: a server with Adam makes up for that.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from flowdup.methods.base import Batch, Method, mean_loss
from flowdup.methods.context import MethodContext
from flowdup.methods.features import FeatureModel
from flowdup.models.network import Weights
from flowdup.params import Params, prefixed, strip_prefix
from flowdup.random import Stream
from flowdup.settings import check_range

_NOISE = 0.01  # by which centroids differ at the start
_LEAST = 1e-3  # a share that counts


@dataclass(frozen=True)
class FLUXConfig:
    """Settings of `flux`."""

    clusters: int = 4  # how many models there are
    centroid_weight: float = 0.1  # of the loss that moves centroids, beside that of the models
    chunk: int = 2048  # points that pass through the features at once

    def __post_init__(self) -> None:
        check_range("method.clusters", self.clusters, 1)
        check_range("method.centroid_weight", self.centroid_weight, 0)
        check_range("method.chunk", self.chunk, 1)


class FLUX(Method):
    """All models and their centroids in psi; see the file's docstring."""

    has_embedding = True

    def __init__(self, config: FLUXConfig, context: MethodContext) -> None:
        self.config, self.f = config, context.f
        self.model, self.init_model = FeatureModel.of(context.f, context), context.init_model
        self.width = 2 * self.model.output.in_features  # of a descriptor
        size = config.clusters * (self.f.size + self.width)
        remedy = "lower method.clusters or choose a smaller model"
        context.check_size(size, "all clusters' models", remedy)
        drawn = self.f.init(context.stream.child("features"))
        self.fingerprint = _fingerprint(drawn)
        self.fixed = {n: w.to(context.device, context.dtype) for n, w in drawn.items()}

    def init(self, stream: Stream) -> Params:
        count = self.config.clusters
        models = {n: w.expand(count, *w.shape).clone() for n, w in self.init_model(stream).items()}
        draw = stream.child("centroids").uniform(count * self.width)
        centroids = _NOISE * torch.from_numpy(draw).reshape(count, self.width)
        shares = torch.full((count,), 1 / count)
        return prefixed("theta.", models) | {"centroids": centroids, "shares": shares}

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        distances = self._distances(params, batch.x, batch.present)
        winner = _least(distances * params["shares"].clamp(min=_LEAST))
        miss = winner @ distances + (params["shares"] - winner).square().sum()
        taught = (batch.labeled.sum() > 0).to(miss.dtype)  # only labeled clients train
        clustering = self.config.centroid_weight / 2 * taught * miss
        theta = _pick(params, _least(distances))
        return mean_loss(self.f(theta, batch.x), batch) + clustering

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return _pick(params, _least(self._distances(params, x, present)))

    def embedding(self, params: Params, x: Tensor, present: Tensor) -> Tensor:
        """d(X), from features that are not trained."""  # [2 e]
        chunks = zip(*(torch.split(t, self.config.chunk) for t in (x, present)), strict=True)
        sums = present.new_zeros(self.width)
        for rows, here in chunks:
            z = self.model.features(self.fixed, rows)  # [n, e]
            sums = sums + here @ torch.cat([z, z.square()], 1)
        mean, square = (sums / present.sum().clamp(min=1)).chunk(2)
        return torch.cat([mean, (square - mean.square()).clamp(min=0).sqrt()])

    def _distances(self, params: Params, x: Tensor, present: Tensor) -> Tensor:
        """||d(X) - mu_c||^2 for every c."""  # [clusters]
        return (params["centroids"] - self.embedding(params, x, present)).square().sum(1)


def _least(values: Tensor) -> Tensor:
    """1 for the least of values [clusters], 0 for the others."""
    numbers = torch.arange(values.shape[0], device=values.device)
    return (numbers == values.argmin()).to(values.dtype)


def _pick(params: Params, one: Tensor) -> Weights:
    """The model that `one` [clusters] marks with 1."""
    models = strip_prefix(params, "theta.")  # [clusters, ...] each
    return {n: torch.tensordot(one, w, 1) for n, w in models.items()}


def _fingerprint(weights: Weights) -> str:
    """SHA-256 of the features' weights, little-endian."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {list(weight.shape)} ".encode())
        digest.update(weight.contiguous().numpy().astype("<f4").data)
    return digest.hexdigest()
