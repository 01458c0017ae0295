"""What a method is: pure functions for one client and one batch.

Engines decide where they run: one client after the other, a whole cohort as one tensor program, or
on machines of their own.  A method never sees a cohort, a device or a random state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import cross_entropy, log_softmax

from flowdup.errors import FlowdupError
from flowdup.models.network import Network, Weights
from flowdup.params import Params
from flowdup.random import Stream


class Batch(NamedTuple):
    """One batch of one client, in random order.

    The first ceil(B/2) rows are one random half of the batch, the others the second: a method that
    generates a model on one half and evaluates it on the other cuts there (`halves`).
    """

    x: Tensor  # [B, *shape]
    y: Tensor  # [B], any class where there is no label
    present: Tensor  # [B], 1 for a row with data, 0 for padding
    labeled: Tensor  # [B], 1 for a row with data and a label

    def halves(self) -> "tuple[Batch, Batch]":
        """The first half, larger by one where the number is odd, and the second."""
        cut = (self.x.shape[0] + 1) // 2
        return Batch(*(t[:cut] for t in self)), Batch(*(t[cut:] for t in self))


@dataclass(frozen=True)
class NoSettings:
    """Of a method that has none."""


class Objective(Protocol):
    """What a client needs of a method to train."""

    rank_one: tuple[str, ...] = ()  # matrices that meet one vector per batch (`rank_one.py`)

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        """The objective on one batch of one client.

        `start` is what the server sent: psi as the round began, and what it broadcast besides.
        """
        ...


class Method(Objective, Protocol):
    """Subclass it: what a method does not have keeps the default here."""

    f: Network  # the client's model
    learns_unlabeled: bool = False  # whether clients without any label take part in training
    fingerprint: str = ""  # of what comes from the seed and is never sent; empty if nothing does
    lr_scales: tuple[tuple[str, float], ...] = ()  # times the server's rate, by parameters' prefix
    k: int | None = None  # the dimension of its subspace, if it has one
    batch_size: int = 0  # that local batches must have; 0: any
    has_embedding: bool = False  # whether `embedding` tells clients apart
    broadcast: tuple[str, ...] = ()  # what of its server state clients are sent and metrics show
    interpolates: bool = False  # whether models between the global and a personal one make sense
    is_corrected: bool = False  # whether validation clients calibrate it (`methods/corrected.py`)
    relabels: bool = False  # whether `labels` gives labels to points that have none
    predicts_jointly: bool = False  # whether `logits` is more than f with weights of its own

    def init(self, stream: Stream) -> Params:
        """What is trained and sent."""
        ...

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        """The weights of one client's own model, from its unlabeled data x [n, *shape]."""
        ...

    def global_model(self, params: Params) -> Weights:
        """The weights of the one model that it has learned for everyone, from which a later stage
        may begin.
        """
        raise FlowdupError("this method learns no model for everyone: begin from one that does")

    def embedding(self, params: Params, x: Tensor, present: Tensor) -> Tensor:
        """What the method knows of a client, r(X); only where `has_embedding` is true."""
        raise FlowdupError("this method has no embedding of clients: train one that has")

    def labels(self, start: Params, x: Tensor, y: Tensor, present: Tensor) -> Tensor:
        """What a client trains on in a round, by all of its points x [n, *shape] and labels y [n].

        -1 stands for no label, in y and in what is returned; only where `relabels` is true.
        """
        return y

    def server_state(self) -> Params:
        """What the server keeps between rounds besides psi, at the start."""
        return {}

    def update_server_state(self, state: Params, loss: Tensor, deployed: "Deployed") -> Params:
        """That after a round with this mean objective, and what makes models since."""
        return state

    def logits(self, params: Params, x: Tensor, present: Tensor, query: Tensor) -> Tensor:
        """Of the client's own model on query [m, *shape], where x is its unlabeled data.

        Beware: a row of query must not depend on the others, since some may be padding.
        """
        return self.f(self.personalize(params, x, present), query)  # [m, classes]


@dataclass(frozen=True)
class Deployed:
    """What makes models after a round."""

    method: Method
    params: Params  # psi or its moving average, and the numbers of a correction (`corrected.py`)

    def global_model(self) -> Weights:
        """The one for everyone."""
        return self.method.global_model(self.params)


def mean_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy, averaged over the labeled rows; 0 where there is none."""
    losses = cross_entropy(logits, batch.y, reduction="none")  # [B]
    return (losses * batch.labeled).sum() / batch.labeled.sum().clamp(min=1)


def adjusted_loss(logits: Tensor, batch: Batch, share: float) -> Tensor:
    """`mean_loss`, a share of it with the log of the client's label shares added to the logits."""
    plain = mean_loss(logits, batch)
    if not share:
        return plain
    return (1 - share) * plain + share * mean_loss(logits + log_label_shares(batch, logits), batch)


def log_label_shares(batch: Batch, logits: Tensor) -> Tensor:
    """How often each class occurs at the client, by the batch's labels, as a logarithm [classes].

    Where classes are many, one that a batch lacks is not one that the client lacks.  Labels that
    are alone in their class tell how much was missed (Good, "The Population Frequencies of Species
    and the Estimation of Population Parameters", Biometrika 1953), and so much is dealt out to all
    classes equally.  No share is less than 1e-4.
    """
    classes = torch.arange(logits.shape[1], device=logits.device)
    counts = batch.labeled @ (batch.y[:, None] == classes).to(logits)
    total = batch.labeled.sum().clamp(min=1)
    missed = (counts == 1).sum() / total
    shares = (1 - missed) * counts / total + missed / len(classes)
    return shares.clamp(min=1e-4).log()


def sum_entropy(logits: Tensor, present: Tensor) -> Tensor:
    """Sum of the entropies of predictions for the present [n] points, from logits [n, classes]."""
    log_p = log_softmax(logits, dim=1)
    return -(log_p.exp() * log_p).sum(1) @ present


def sum_gradients(
    loss: Callable[[Weights, Tensor, Tensor], Tensor],
    weights: Weights,
    x: Tensor,
    present: Tensor,
    chunk: int,
) -> Weights:
    """The gradient of loss(weights, x, present) summed over chunks, one chunk in memory at a time:
    how a method takes a step on a client's unlabeled set of any size.
    """
    total: Weights = {}
    for rows, here in zip(torch.split(x, chunk), torch.split(present, chunk), strict=True):
        found = grad(loss)(weights, rows, here)
        total = {n: total[n] + g if total else g for n, g in found.items()}
    return total
