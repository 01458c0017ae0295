"""ClientUpdate, the paper's algorithm 2: what one client does in one round."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad_and_value

from flowdup.methods import Batch, Objective, Params
from flowdup.optimizers import Optimizer, OptimizerConfig, State
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


class Local(NamedTuple):
    """What a client has in hand between two local steps."""

    dense: Params  # psi, without the matrices that have factors
    slots: State  # its optimiser's
    factors: dict[str, Factors]  # of what it added to the other matrices


class Step(NamedTuple):
    local: Local
    change: dict[str, Outer]  # of the matrices that have factors
    loss: Tensor


class Update(NamedTuple):
    delta: Params  # psi - psi_start, without the matrices that have factors
    factors: dict[str, Factors]  # theirs
    loss: Tensor  # mean of the objective over the steps taken

    def whole(self) -> Params:
        """psi - psi_start."""
        return self.delta | {n: f.product() for n, f in self.factors.items()}


def batch_plans(
    stream: Stream, config: ClientConfig, points: Mapping[int, int]
) -> dict[int, NDArray[np.int64]]:
    """By lane, which point stands in which row of which local batch; -1: none.  # [steps, B]

    `points` says how many a lane's client has.  Each epoch has an order of its own.  A short last
    batch of n points puts ceil(n/2) of them at the start of the first half and the others at the
    start of the second, so both stay random halves, and one point alone generates a model though
    nothing is left to evaluate it on.
    """
    first, longest = min(points), max(points.values())
    lanes, sizes = (np.fromiter(part, np.int64) for part in (points, points.values()))
    epochs = []
    for epoch in range(config.epochs):
        words = stream.child(epoch).lanes(first, max(points) - first + 1, longest)[lanes - first]
        words[np.arange(longest) >= sizes[:, None]] = np.iinfo(words.dtype).max  # sorted to the end
        orders = np.full((len(lanes), longest + 1), -1, np.int64)
        orders[:, :-1] = np.argsort(words, axis=1, kind="stable")
        epochs.append(orders)
    plans: dict[int, NDArray[np.int64]] = {}
    for n in np.unique(sizes):
        alike, places = np.flatnonzero(sizes == n), _places(int(n), config.batch_size)
        whole = np.concatenate([orders[alike][:, places] for orders in epochs], axis=1)
        plans |= zip(lanes[alike].tolist(), whole, strict=True)
    return {lane: plans[lane] for lane in points}


def batch_plan(stream: Stream, points: int, config: ClientConfig, lane: int) -> NDArray[np.int64]:
    """That of one lane."""
    return batch_plans(stream, config, {lane: points})[lane]


@cache
def _places(points: int, size: int) -> NDArray[np.int64]:
    """Where the points of an epoch stand, by their place in its order; -1: none.  # [steps, B]"""
    plan = np.full((-(-points // size), size), -1, np.int64)
    half = (size + 1) // 2
    for row, start in zip(plan, range(0, points, size), strict=True):
        batch = np.arange(start, min(start + size, points))
        first = (batch.size + 1) // 2
        row[:first] = batch[:first]
        row[half : half + batch.size - first] = batch[first:]
    return plan


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


def begin(method: Objective, config: ClientConfig, params: Params, steps: int) -> Local:
    """What a client starts from that will take so many steps at most."""
    optimizer = Optimizer(config.optimizer)
    names = method.rank_one if optimizer.plain else ()
    dense = {n: p for n, p in params.items() if n not in names}
    return Local(dense, optimizer.init(dense), {n: Factors.none(params[n], steps) for n in names})


def local_step(
    method: Objective,
    config: ClientConfig,
    start: Params,
    local: Local,
    batch: Batch,
    place: Tensor,
) -> Step:
    """psi <- GradientUpdate(psi, g; eta_l) on one local batch.

    `start` is what the server sent, `place` [steps] is 1 where the step stands among its client's.
    """

    def objective(dense: Params, probes: dict[str, Outer]) -> Tensor:
        matrices: Any = {
            n: RankOne(start[n], factors, probes[n]) for n, factors in local.factors.items()
        }
        return method.loss(dense | matrices, batch, start)

    probes = {n: Outer.zeros(start[n]) for n in local.factors}
    (grads, outer), loss = grad_and_value(objective, (0, 1))(local.dense, probes)
    if config.clip:
        grads, outer = clip_norm(grads, outer, config.clip)
    dense, slots = Optimizer(config.optimizer).step(local.dense, grads, local.slots)
    change = {n: Outer(-config.optimizer.lr * g, a) for n, (g, a) in outer.items()}
    factors = {n: f.put(change[n], place) for n, f in local.factors.items()}
    return Step(Local(dense, slots, factors), change, loss)


LocalStep = Callable[[Params, Local, Batch, Tensor], Step]  # what `local_step` is for a method


def client_update(
    method: Objective,
    config: ClientConfig,
    params: Params,
    batches: Batch,
    told: Params,
    step: LocalStep | None = None,  # the same as `local_step`, but faster
    room: int = 0,  # for how many steps that one was made; 0: any
) -> Update:
    """All local steps of a round; `batches` holds them, [steps, B, ...]."""
    steps = batches.x.shape[0]
    step, room = step or partial(local_step, method, config), room or steps
    local, losses = begin(method, config, params, room), []
    for number, place in enumerate(torch.eye(steps, room).to(batches.present)):
        batch = Batch(*(t[number] for t in batches))
        local, _, loss = step(params | told, local, batch, place)
        losses.append(loss)
    delta = {n: p - params[n] for n, p in local.dense.items()}
    return Update(delta, local.factors, torch.stack(losses).mean())
