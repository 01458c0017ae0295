"""What passes between server and client in a round: a task down, a reply up, and no data.

A message can be checked without knowing the method: its tensors have names, shapes and types that
follow from psi, a size in bytes, and finite numbers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flowdup.errors import MessageError, NotFiniteError
from flowdup.params import Params
from flowdup.rank_one import Factors

Cohort = Mapping[int, int]  # by position in the cohort, the client's id


class TensorSpec(NamedTuple):
    """Shape and type of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Schema = dict[str, TensorSpec]


def schema_of(params: Params) -> Schema:
    """The shapes and types that a message with these tensors has, by name."""
    return {n: TensorSpec(tuple(p.shape), p.dtype) for n, p in params.items()}


@dataclass(frozen=True)
class Task:
    """What the server asks of the members of a cohort.

    A client draws its batches by the round and its position; one that is far away is sent the task
    `for_member`, which says nothing of the others.
    """

    round: int
    psi: Params
    broadcast: Params  # what the method's server state tells clients
    cohort: Cohort

    def for_member(self, position: int) -> "Task":
        """The task with one member of the cohort alone."""
        return replace(self, cohort={position: self.cohort[position]})

    def check(self, schema: Schema) -> "Task":
        """The task itself; MessageError if its psi is not such a one."""
        _check_names(self.psi, schema)
        for name, tensor in self.psi.items():
            _check_tensor(name, tensor, schema[name])
        return self

    @property
    def start(self) -> Params:
        """All tensors that a client is sent."""
        return self.psi | self.broadcast

    @property
    def bytes(self) -> int:
        """How many bytes of tensors are sent to a client."""
        return _bytes(self.start.values())


@dataclass(frozen=True)
class Reply:
    """What comes back: how psi changed, for one client or summed over several.

    A change that is a sum of few outer products may come as factors, for one client alone.
    """

    round: int
    delta: Params  # psi - psi_start, without what has factors
    loss: Tensor  # the mean objective over the steps taken
    points: int  # rows of batches that held data
    rows: int  # all of them, padding too
    factors: dict[str, Factors] = field(default_factory=dict)
    clients: int = 1  # whose sum this is
    member: int = -1  # the position in the cohort, by the engine; -1: of a sum, or unknown

    @property
    def bytes(self) -> int:
        """How many bytes of tensors are sent back."""
        return _bytes([*self.delta.values(), *(t for f in self.factors.values() for t in f)])

    def whole_delta(self) -> Params:
        """The change of every tensor, factors multiplied."""
        return self.delta | {n: f.product() for n, f in self.factors.items()}

    def check(self, round: int, schema: Schema) -> "Reply":
        """The reply itself; MessageError if it is not one to a task with such a psi."""
        if self.round != round:
            raise MessageError(f"a reply to round {self.round} came in round {round}: drop it")
        _check_names([*self.delta, *self.factors], schema)
        for name, tensor in self.delta.items():
            _check_tensor(name, tensor, schema[name])
        for name, (left, right) in self.factors.items():
            shape, dtype = schema[name]
            if len(shape) != 2 or left.ndim != 2 or self.clients != 1:
                raise MessageError(f"a message has factors of '{name}' that cannot be: drop it")
            for side, tensor, width in zip(("left", "right"), (left, right), shape, strict=True):
                wanted = TensorSpec((left.shape[0], width), dtype)
                _check_tensor(f"{name}, {side}", tensor, wanted)
        counted = 0 <= self.points <= self.rows and self.rows > 0 and self.clients > 0
        if self.loss.shape != () or not self.loss.is_floating_point() or not counted:
            raise MessageError("a reply has a loss or counts that cannot be: drop it")
        return self

    def check_finite(self) -> "Reply":
        """The reply itself; NotFiniteError if a number is NaN or infinite.  On a GPU this waits."""
        factors = [(name, t) for name, pair in self.factors.items() for t in pair]
        for name, tensor in [*self.delta.items(), *factors, ("loss", self.loss)]:
            if not bool(torch.isfinite(tensor).all()):
                raise NotFiniteError(f"a reply has NaN or infinite numbers in '{name}': drop it")
        return self


class Refusal(NamedTuple):
    """A reply that was left out of a round, and why."""

    member: int  # position in the cohort; -1: unknown
    reason: str


def _check_names(names: Iterable[str], schema: Schema) -> None:
    names = list(names)
    if sorted(names) != sorted(schema):
        odd = sorted(set(names) ^ set(schema)) or sorted(n for n in names if names.count(n) > 1)
        raise MessageError(f"a message has other tensors than psi ('{odd[0]}'): drop it")


def _check_tensor(name: str, tensor: Tensor, wanted: TensorSpec) -> None:
    if tuple(tensor.shape) != wanted.shape or tensor.dtype != wanted.dtype:
        raise MessageError(
            f"a message has '{name}' of shape {tuple(tensor.shape)} and type {tensor.dtype}, psi "
            f"has {wanted.shape} and {wanted.dtype}: drop it"
        )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
