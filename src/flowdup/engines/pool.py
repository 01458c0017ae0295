"""The points of many clients in one tensor, on the device that works on them."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from flowdup.data.clients import ClientData
from flowdup.methods import Batch


class Pool(NamedTuple):
    """Inputs as they are stored (bytes, for images), images pixel by pixel: channels last."""

    x: Tensor  # [points, *shape], for images [points, height, width, channels]
    y: Tensor  # [points], -1 where there is no label
    first: Mapping[int, int]  # by client, the row of its first point

    @classmethod
    def of(cls, clients: Mapping[int, ClientData], device: torch.device) -> "Pool":
        """One after the other; memory twice as much as theirs at most, on the host."""
        members = list(clients.values())
        x = torch.cat([client.x for client in members])
        y = torch.cat([_labels(client) for client in members])
        first = dict(zip(clients, accumulate(map(len, members), initial=0), strict=False))
        return cls(_pixels_first(x).to(device), y.to(device), first)

    def batch(self, rows: Tensor, dtype: torch.dtype) -> Batch:
        """The points in these rows [..., B] of the pool; -1 stands for none."""
        present, rows = rows >= 0, rows.clamp(min=0)
        x, y = self.x[rows], self.y[rows]
        if self.x.ndim == 4:
            x = x.movedim(-1, -3)
        labeled = present & (y >= 0)
        return Batch(x, y.clamp(min=0), present.to(dtype), labeled.to(dtype))


def size(clients: Iterable[ClientData]) -> int:
    """Bytes of their inputs."""
    return sum(client.x.numel() * client.x.element_size() for client in clients)


def _labels(client: ClientData) -> Tensor:
    return torch.full((len(client),), -1) if client.y is None else client.y


def _pixels_first(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous() if x.ndim == 4 else x
