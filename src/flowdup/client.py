"""ClientUpdate, the paper's algorithm 2: what one client does in one round."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flowdup.augmentation import Augmentation
from flowdup.messages import Reply, Task
from flowdup.methods.base import Batch, Objective
from flowdup.optimizers import Optimizer, OptimizerConfig, State
from flowdup.params import Params
from flowdup.rank_one import FactoredParams, Outer, applied_once, gradient_and_value
from flowdup.settings import check_range


@dataclass(frozen=True)
class ClientConfig:
    """Settings of `client`: local steps on a client's own data."""

    epochs: int = 1  # passes over a client's points in a round
    batch_size: int = 50  # points in a local step; FLowDUP halves them
    clip: float = 1.0  # the largest norm of a gradient; 0: no limit
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mirror: bool = False  # training images mirrored, half of them at random
    shift: int = 0  # training images moved at random, by up to so many pixels in each direction
    rotate_batches: bool = False  # all images of a batch by the same 0 to 3 quarter turns

    def __post_init__(self) -> None:
        check_range("client.epochs", self.epochs, 1)
        check_range("client.batch_size", self.batch_size, 2)  # a batch is cut in two halves
        check_range("client.clip", self.clip, 0)
        Optimizer(self.optimizer)  # refuses what it cannot do, before anything runs
        _ = self.augmentation  # likewise

    @property
    def augmentation(self) -> Augmentation:
        """What is done to training images, as `mirror`, `shift` and `rotate_batches` say."""
        return Augmentation(self.mirror, self.shift, self.rotate_batches)

    def steps(self, points: int) -> int:
        """How many local steps a client with so many points takes in a round."""
        return self.epochs * -(-points // self.batch_size)


class Local(NamedTuple):
    """What a client has in hand between two local steps."""

    psi: FactoredParams
    optimizer: State


class Step(NamedTuple):
    """What one local step gave."""

    local: Local
    change: dict[str, Outer]  # of the factored matrices
    loss: Tensor


LocalStep = Callable[[Params, Local, Batch, Tensor], Step]


@dataclass(frozen=True)
class ClientUpdate:
    """The algorithm for one method; `factored` names matrices kept as factors (`rank_one.py`)."""

    method: Objective
    config: ClientConfig
    factored: tuple[str, ...] = ()

    @classmethod
    def for_task(
        cls, method: Objective, config: ClientConfig, task: Task, batch: Batch
    ) -> "ClientUpdate":
        """With all of the method's rank-one matrices factored that a loss on this batch allows."""
        if not method.rank_one or not Optimizer(config.optimizer).plain:
            return cls(method, config)

        def loss(psi: Params) -> Tensor:
            return method.loss(psi, batch, task.start)

        return cls(method, config, applied_once(loss, task.psi, method.rank_one))

    def __call__(
        self, task: Task, batches: Batch, step: LocalStep | None = None, most_steps: int = 0
    ) -> Reply:
        """All local steps of a round; `batches` holds them, [steps, B, ...].

        `step` is a faster version of this one's own, made for clients with `most_steps`.
        """
        steps = batches.x.shape[0]
        step, most_steps = step or self.step, most_steps or steps
        local, losses = self.begin(task.psi, most_steps), []
        for number, place in enumerate(torch.eye(steps, most_steps).to(batches.present)):
            batch = Batch(*(t[number] for t in batches))
            local, _, loss = step(task.start, local, batch, place)
            losses.append(loss)
        delta = {n: p - task.psi[n] for n, p in local.psi.dense.items()}
        points, rows = int(batches.present.sum()), batches.present.numel()
        return Reply(task.round, delta, torch.stack(losses).mean(), points, rows, local.psi.factors)

    def begin(self, psi: Params, most_steps: int) -> Local:
        """What a client starts from that will take so many steps at most."""
        own = FactoredParams.start(psi, self.factored, most_steps)
        return Local(own, Optimizer(self.config.optimizer).init(own.dense))

    def step(self, start: Params, local: Local, batch: Batch, place: Tensor) -> Step:
        """psi <- GradientUpdate(psi, g; eta_l) on one local batch.

        `start` is what the server sent, `place` [most_steps] the step's number, one-hot.
        """

        def loss(psi: Params) -> Tensor:
            return self.method.loss(psi, batch, start)

        g, value = gradient_and_value(loss, start, local.psi)
        if self.config.clip:
            g = g.clipped(self.config.clip)
        optimizer = Optimizer(self.config.optimizer)
        dense, state = optimizer.step(local.psi.dense, g.dense, local.optimizer)
        change = {n: o.scaled(-self.config.optimizer.lr) for n, o in g.outer.items()}
        factors = {n: f.put(change[n], place) for n, f in local.psi.factors.items()}
        return Step(Local(FactoredParams(dense, factors), state), change, value)
