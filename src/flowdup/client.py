"""ClientUpdate, the paper's algorithm 2: what one client does in one round."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad_and_value

from flowdup.errors import ConfigError
from flowdup.methods import Batch, Method, Params
from flowdup.optimizers import Optimizer, OptimizerConfig
from flowdup.random import Stream


@dataclass(frozen=True)
class ClientConfig:
    epochs: int = 1
    batch_size: int = 50
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 2:
            raise ConfigError(
                "client.epochs must be at least 1 and client.batch_size at least 2 (each batch is "
                f"cut in two halves), not {self.epochs} and {self.batch_size}"
            )


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


def client_update(method: Method, optimizer: Optimizer, params: Params, batches: Batch) -> Update:
    """psi <- GradientUpdate(psi, g; eta_l) for every local batch; returns psi - psi_start.

    `batches` holds all local steps, [steps, B, ...].  A step without a single point (padding of a
    client that has fewer batches than its neighbours in a cohort) changes nothing.
    """
    start, state = params, optimizer.init(params)
    total, taken = torch.zeros_like(batches.present[0, 0]), batches.present.any(1)  # [], [steps]
    for step in range(batches.x.shape[0]):
        batch = Batch(*(t[step] for t in batches))
        grads, loss = grad_and_value(method.loss)(params, batch, start)
        new_params, new_state = optimizer.step(params, grads, state)
        params = {n: torch.where(taken[step], new_params[n], p) for n, p in params.items()}
        state = {n: torch.where(taken[step], new_state[n], s) for n, s in state.items()}
        total = total + torch.where(taken[step], loss, 0)
    return Update({n: params[n] - start[n] for n in start}, total / taken.sum().clamp(min=1))
