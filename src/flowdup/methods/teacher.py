"""A teacher: the federation's own model labels the points of clients that have no labels.

It is one model for everyone, whose weights the server broadcasts after every round: of psi's moving
average where the server keeps one, calibrated where validation clients calibrate it
(`corrected.py`).  A personal teacher is the model that psi's average makes of the client's own
points, not calibrated: the server broadcasts this average (`flowdup_plus.py`).  Before a client
takes its steps, with teacher T and class shares q by EM (`prior.py`) on all of its points without a
label, as they are, not augmented,

    y(x) = argmax of T(x) + log q,  if its probability is at least `threshold`, and above chance

At first T is the model that the stage began from; without one it knows nothing for `warm_up`
rounds, and no point is labeled.

Lee, "Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method for Deep Neural
Networks", ICML workshop 2013; Tarvainen, Valpola, "Mean Teachers are Better Role Models", NeurIPS
2017, for the average.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowdup.methods.context import MethodContext
from flowdup.models.network import Weights
from flowdup.params import Params, prefixed, strip_prefix
from flowdup.prior import log_prior, sparsity_for
from flowdup.settings import check_range

Shapes = Mapping[str, tuple[int, ...]]

_PREFIX = "teacher."
_CHUNK = 2048  # points that pass through f at once
_PREFERS = 1.001  # times 1 / classes: less is no opinion, whatever the threshold


@dataclass(frozen=True)
class TeacherConfig:
    """Settings of the teacher."""

    threshold: float = 0.8  # the least probability of a label that it gives
    prior: bool = True  # whether it knows how often classes occur at a client
    sparsity: float = 0.03  # taken off each of these shares in EM, so that few classes remain;
    # with more than ten classes, less of it (`sparsity_for`)
    warm_up: int = 150  # rounds without a teacher, where no stage came before

    def __post_init__(self) -> None:
        check_range("method.teacher.threshold", self.threshold, 0, 1)
        check_range("method.teacher.sparsity", self.sparsity, 0, 1)
        check_range("method.teacher.warm_up", self.warm_up, 0)


Maker = Callable[[Params, Tensor, Tensor], Weights]  # as `Method.personalize`


class Teacher:
    """Its parameters are part of the method's server state, `broadcast` to clients."""

    def __init__(
        self,
        config: TeacherConfig,
        context: MethodContext,
        shapes: Shapes,  # of its parameters
        start: Params,  # those of them that are not 0 at the start
        model: Maker,  # of its parameters
    ) -> None:
        self.config, self.f, self.shapes, self.start = config, context.f, shapes, start
        self.model, self.has_start = model, bool(context.start)
        self.warm_up = 0 if self.has_start else config.warm_up
        self.broadcast = tuple(f"{_PREFIX}{name}" for name in shapes)

    @classmethod
    def for_everyone(cls, config: TeacherConfig, context: MethodContext) -> "Teacher":
        """One model, whose weights are the parameters."""
        return cls(config, context, context.f.shapes, context.start_here(), lambda own, *_: own)

    def server_state(self) -> Params:
        """Its parameters at the start, and the rounds since."""
        nothing = {n: torch.zeros(shape) for n, shape in self.shapes.items()}
        return prefixed(_PREFIX, nothing | self.start) | {"rounds": torch.zeros(())}

    def updated(self, state: Params, latest: Params) -> Params:
        """The state after a round that gave it these parameters, others among them."""
        rounds = state["rounds"] + 1
        ready = rounds > self.warm_up
        own = {n: torch.where(ready, latest[n], state[f"{_PREFIX}{n}"]) for n in self.shapes}
        return prefixed(_PREFIX, own) | {"rounds": rounds}

    def labels(self, start: Params, x: Tensor, y: Tensor, present: Tensor) -> Tensor:
        """y, with the teacher's labels where there is none (-1) and the teacher is sure."""
        params = strip_prefix(start, _PREFIX)
        weights = self.model(params, x, present)
        logits = torch.cat([self.f(weights, rows) for rows in torch.split(x, _CHUNK)])
        if not self.has_start:  # parameters that are all 0 have learned nothing yet
            logits = logits * torch.stack([p.any() for p in params.values()]).any()
        if self.config.prior:
            without = present * (y < 0)
            sparsity = sparsity_for(logits.shape[1], self.config.sparsity)
            logits = logits + log_prior(logits, without, sparsity)
        probability, found = logits.softmax(1).max(1)
        knows = probability * logits.shape[1] > _PREFERS
        sure = knows & (probability >= self.config.threshold)
        return torch.where((y < 0) & sure, found, y)
