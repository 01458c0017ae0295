"""Local batches: which point of a client stands in which row of which batch, and those rows."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.augmentation import POINT, Augmentation
from flowdup.data.clients import ClientData, LazyClients
from flowdup.methods.base import Batch
from flowdup.random import Stream

_UNCAPPED = 1024  # rows of a batch that are cheap enough to be empty
_AS_IT_IS = Augmentation()

# [steps, B]: the point in every row of every batch, in the upper bits how it is augmented; -1: none
Plan = NDArray[np.int64]


def batch_plans(
    orders: Stream,
    points: Mapping[int, int],
    epochs: int,
    size: int,
    augmentation: Augmentation = _AS_IT_IS,
) -> dict[int, Plan]:
    """The batches of a round by position in the cohort, for clients with so many points.

    Each epoch has an order of its own.  A short last batch of n points puts ceil(n/2) of them at
    the start of the first half and the others at the start of the second, so both stay random
    halves, and one point alone generates a model though nothing is left to evaluate it on.
    """
    first, longest = min(points), max(points.values())
    positions, sizes = (np.fromiter(part, np.int64) for part in (points, points.values()))
    epoch_orders = []
    for epoch in range(epochs):
        drawn = orders.child(epoch).substreams(first, max(points) - first + 1, longest)
        words = drawn[positions - first]
        words[np.arange(longest) >= sizes[:, None]] = np.iinfo(words.dtype).max  # sorted to the end
        order = np.full((len(positions), longest + 1), -1, np.int64)
        order[:, :-1] = np.argsort(words, axis=1, kind="stable")
        epoch_orders.append(order)
    plans: dict[int, Plan] = {}
    for n in np.unique(sizes):
        alike, places = np.flatnonzero(sizes == n), _places(int(n), size)
        whole = np.concatenate([order[alike][:, places] for order in epoch_orders], axis=1)
        plans |= zip(positions[alike].tolist(), whole, strict=True)
    if augmentation:
        most, draw = max(map(len, plans.values())), orders.child("augmentation")
        span = max(points) - first + 1
        words = draw.substreams(first, span, most * size).reshape(-1, most, size)
        changes = augmentation.changes(words, draw.child("batch").substreams(first, span, most))
        for position, plan in plans.items():
            change = changes[position - first, : len(plan)]
            plans[position] = np.where(plan < 0, plan, plan | change)
    return {position: plans[position] for position in points}


def batch_plan(
    orders: Stream,
    position: int,
    points: int,
    epochs: int,
    size: int,
    augmentation: Augmentation = _AS_IT_IS,
) -> Plan:
    """That of one client."""
    return batch_plans(orders, {position: points}, epochs, size, augmentation)[position]


@cache
def _places(points: int, size: int) -> Plan:
    """Where the points of an epoch stand, by their place in its order."""
    plan = np.full((-(-points // size), size), -1, np.int64)
    half = (size + 1) // 2
    for row, start in zip(plan, range(0, points, size), strict=True):
        batch = np.arange(start, min(start + size, points))
        first = (batch.size + 1) // 2
        row[:first] = batch[:first]
        row[half : half + batch.size - first] = batch[first:]
    return plan


class PointPool(NamedTuple):
    """The points of some clients in one tensor, on the device that works on them.

    Inputs are as they are stored (bytes, for images); images lie channels last, which is much
    faster through convolutions and pooling.
    """

    x: Tensor  # [points, *shape], for images [points, height, width, channels]
    y: Tensor  # [points], -1 where there is no label
    first: Mapping[int, int]  # by client, the row of its first point
    augmentation: Augmentation = _AS_IT_IS

    @classmethod
    def of(
        cls,
        clients: Mapping[int, ClientData],
        device: torch.device,
        augmentation: Augmentation = _AS_IT_IS,
    ) -> "PointPool":
        """One client after the other; on the host it takes twice their memory at most."""
        members = list(clients.values())
        x = torch.cat([m.x for m in members]) if len(members) > 1 else members[0].x
        y = torch.cat([m.labels for m in members])  # never a client's own: it may be changed
        if augmentation:
            augmentation.check(x)
        first = dict(zip(clients, accumulate(map(len, members), initial=0), strict=False))
        if x.ndim == 4:
            x = x.movedim(1, -1).contiguous()
        return cls(x.to(device), y.to(device), first, augmentation)

    def batch(self, rows: Tensor, dtype: torch.dtype) -> Batch:
        """The points in these rows [..., B]; -1 stands for none."""
        present, rows = rows >= 0, rows.clamp(min=0)
        if self.augmentation:
            x, y = self.augmentation.images(self.x, rows), self.y[rows & POINT]
        else:
            x = self.x.index_select(0, rows.flatten())  # on a CPU ten times as fast as self.x[rows]
            x, y = x.reshape(*rows.shape, *self.x.shape[1:]), self.y[rows]
        if self.x.ndim == 4:
            x = x.movedim(-1, -3)
        labeled = present & (y >= 0)
        return Batch(x, y.clamp(min=0), present.to(dtype), labeled.to(dtype))


def local_batches(
    client: ClientData,
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    augmentation: Augmentation = _AS_IT_IS,
) -> Batch:
    """All of one client's batches of a round, [steps, B, ...]."""
    pool = PointPool.of({0: client}, device, augmentation)
    batch = pool.batch(torch.from_numpy(plan).to(device), dtype)
    if client.x.ndim == 4 and client.x.shape[1] == 1:
        # one channel lies first and last at once; strides say which, and torch's kernels differ
        batch = batch._replace(x=batch.x.flatten().view(batch.x.shape))
    return batch


def input_bytes(clients: Iterable[ClientData]) -> int:
    """How much memory the inputs of clients take."""
    return sum(client.x.numel() * client.x.element_size() for client in clients)


def most_points(clients: Sequence[ClientData]) -> int:
    """The most that one of them has, if known; 0 where asking would make them all."""
    if isinstance(clients, LazyClients):
        return clients.points
    return max(map(len, clients), default=0) if isinstance(clients, list) else 0


def cap_batch_size(size: int, clients: Sequence[ClientData]) -> int:
    """A batch size, cut to the points of the largest client where none fills it.

    It takes off rows without data.  Up to 1024 they are kept, and with them every bit.
    """
    if size <= _UNCAPPED or (isinstance(clients, LazyClients) and "points" not in clients.recipe):
        return size  # of lazy clients that a user makes, some may have more points than others
    points = most_points(clients)
    return min(size, max(points, 2)) if points else size
