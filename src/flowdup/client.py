"""ClientUpdate, the paper's algorithm 2: what one client does in one round."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad_and_value

from flowdup.methods import Batch, Method, Params
from flowdup.optimizers import Optimizer, OptimizerConfig
from flowdup.random import Stream
from flowdup.rank_one import Factors, Outer, RankOne
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
    delta: Params  # psi - psi_start, without the matrices that have factors
    factors: dict[str, Factors]  # theirs
    loss: Tensor  # mean of the objective over the steps taken

    def whole(self) -> Params:
        """psi - psi_start."""
        return self.delta | {n: f.left.T @ f.right for n, f in self.factors.items()}


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


def clip_norm(
    grads: Params, outer: dict[str, Outer], limit: float
) -> tuple[Params, dict[str, Outer]]:
    """g <- g min(1, limit / ||g||), the norm taken over all parameters together."""
    squares = [g.square().sum() for g in grads.values()] + [o.square() for o in outer.values()]
    scale = limit / torch.stack(squares).sum().sqrt().clamp(min=limit)
    return (
        {n: g * scale for n, g in grads.items()},
        {n: Outer(o.g * scale, o.a) for n, o in outer.items()},
    )


def client_update(
    method: Method, config: ClientConfig, params: Params, batches: Batch, told: Params
) -> Update:
    """psi <- GradientUpdate(psi, g; eta_l) for every local batch; returns psi - psi_start.

    `batches` holds all local steps, [steps, B, ...].  A step without a single point (padding of a
    client that has fewer batches than its neighbours in a cohort) changes nothing.
    """
    optimizer = Optimizer(config.optimizer)
    names = method.rank_one if optimizer.plain else ()
    start, dense = params | told, {n: p for n, p in params.items() if n not in names}
    factors = {n: Factors.none(params[n]) for n in names}
    probes = {n: Outer.zeros(params[n]) for n in names}
    state = optimizer.init(dense)

    def objective(
        dense: Params, probes: dict[str, Outer], factors: dict[str, Factors], batch: Batch
    ) -> Tensor:
        matrices: Any = {n: RankOne(params[n], factors[n], probes[n]) for n in names}
        return method.loss(dense | matrices, batch, start)

    total, taken = torch.zeros_like(batches.present[0, 0]), batches.present.any(1)  # [], [steps]
    for step in range(batches.x.shape[0]):
        batch = Batch(*(t[step] for t in batches))
        (grads, outer), loss = grad_and_value(objective, (0, 1))(dense, probes, factors, batch)
        if config.clip:
            grads, outer = clip_norm(grads, outer, config.clip)
        new_dense, new_state = optimizer.step(dense, grads, state)
        dense = {n: torch.where(taken[step], new_dense[n], p) for n, p in dense.items()}
        state = {n: torch.where(taken[step], new_state[n], s) for n, s in state.items()}
        for name, (g, a) in outer.items():
            change = torch.where(taken[step], -config.optimizer.lr * g, 0)
            factors[name] = factors[name].plus(Outer(change, a))
        total = total + torch.where(taken[step], loss, 0)
    delta = {n: p - start[n] for n, p in dense.items()}
    return Update(delta, factors, total / taken.sum().clamp(min=1))
