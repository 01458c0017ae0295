"""ClientUpdate, the paper's algorithm 2: what one client does in one round."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad_and_value

from flowdup.methods import Batch, Method, Params
from flowdup.optimizers import Optimizer, OptimizerConfig
from flowdup.random import Stream
from flowdup.settings import check_range


@dataclass(frozen=True)
class ClientConfig:
    epochs: int = 1
    batch_size: int = 50
    clip: float = 1.0  # the largest norm of a gradient; 0: no limit
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        check_range("client.epochs", self.epochs, 1)
        check_range("client.batch_size", self.batch_size, 2)  # a batch is cut in two halves
        check_range("client.clip", self.clip, 0)
        Optimizer(self.optimizer)  # refuses what it cannot do, before anything runs


class Update(NamedTuple):
    delta: Params  # psi - psi_start
    loss: Tensor  # mean of the objective over the steps taken


def batch_plan(stream: Stream, points: int, config: ClientConfig, lane: int) -> NDArray[np.int64]:
    """Which point stands in which row of which local batch; -1 marks padding.  # [steps, B]

    Each epoch has an order of its own.  A short last batch of n points puts ceil(n/2) of them at
    the start of the first half and the others at the start of the second, so both stay random
    halves, and one point alone generates a model though nothing is left to evaluate it on.
    """
    size, half = config.batch_size, (config.batch_size + 1) // 2
    plans = []
    for epoch in range(config.epochs):
        order = np.argsort(stream.child(epoch).lanes(lane, 1, points)[0], kind="stable")
        plan = np.full((-(-points // size), size), -1, np.int64)
        for row, start in zip(plan, range(0, points, size), strict=True):
            batch = order[start : start + size]
            first = (batch.size + 1) // 2
            row[:first] = batch[:first]
            row[half : half + batch.size - first] = batch[first:]
        plans.append(plan)
    return np.concatenate(plans)


def clip_norm(grads: Params, limit: float) -> Params:
    """g <- g min(1, limit / ||g||), the norm taken over all parameters together."""
    norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
    return {n: g * (limit / norm.clamp(min=limit)) for n, g in grads.items()}


def client_update(
    method: Method, config: ClientConfig, params: Params, batches: Batch, told: Params
) -> Update:
    """psi <- GradientUpdate(psi, g; eta_l) for every local batch; returns psi - psi_start.

    `batches` holds all local steps, [steps, B, ...].  A step without a single point (padding of a
    client that has fewer batches than its neighbours in a cohort) changes nothing.
    """
    optimizer = Optimizer(config.optimizer)
    start, state = params | told, optimizer.init(params)
    total, taken = torch.zeros_like(batches.present[0, 0]), batches.present.any(1)  # [], [steps]
    for step in range(batches.x.shape[0]):
        batch = Batch(*(t[step] for t in batches))
        grads, loss = grad_and_value(method.loss)(params, batch, start)
        grads = clip_norm(grads, config.clip) if config.clip else grads
        new_params, new_state = optimizer.step(params, grads, state)
        params = {n: torch.where(taken[step], new_params[n], p) for n, p in params.items()}
        state = {n: torch.where(taken[step], new_state[n], s) for n, s in state.items()}
        total = total + torch.where(taken[step], loss, 0)
    return Update({n: p - start[n] for n, p in params.items()}, total / taken.sum().clamp(min=1))
