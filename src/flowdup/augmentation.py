"""Augmentation: training images mirrored and shifted at random, by the seed.

A row of a batch plan (`batches.py`) holds beside a point's number how its image is changed, so
engines pass the change along without knowing of it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.errors import ConfigError
from flowdup.random import Words
from flowdup.settings import check_range

POINT = 2**32 - 1  # the bits of a row that say which point it is
_SIDE = 8  # bits for a shift in one direction


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images that keep their labels: mirrored, moved.

    Where an image leaves a side free, its corner's colour comes in: a background stays what it is,
    be it black or white.
    """

    mirror: bool = False  # half of the images, left and right exchanged
    shift: int = 0  # by up to so many pixels in each direction

    def __post_init__(self) -> None:
        check_range("client.shift", self.shift, 0, 2 ** (_SIDE - 1) - 1)

    def __bool__(self) -> bool:
        return self.mirror or self.shift > 0

    def check(self, x: Tensor) -> None:
        """Refuse points [points, *shape] that cannot be changed so."""
        if x.ndim != 4:
            raise ConfigError(
                f"client.mirror and client.shift are for images, and an input has {x.ndim - 1} "
                "dimensions: switch them off"
            )
        if self.shift >= (side := min(x.shape[2:])):
            raise ConfigError(
                f"client.shift = {self.shift} would move images of {side} pixels out of sight: "
                f"choose less than {side}"
            )
        if x.shape[0] > POINT:
            raise ConfigError(
                f"client.mirror and client.shift are for at most {POINT:,} points at once, and "
                f"there are {x.shape[0]:,}: switch them off"
            )

    def changes(self, words: Words) -> NDArray[np.int64]:
        """A random change for every word, as the upper bits of a row."""
        drawn, places = words.astype(np.int64), 2 * self.shift + 1
        down = (drawn >> 1 & 0x7FFF) * places >> 15
        right = (drawn >> 16) * places >> 16
        change = (drawn & 1 if self.mirror else 0) | down << 1 | right << (1 + _SIDE)
        return change << 32

    def images(self, pool: Tensor, rows: Tensor) -> Tensor:
        """Images of a pool [points, height, width, channels] in these rows, changed."""
        point, change = rows & POINT, rows >> 32
        mirror, down, right = change & 1, change >> 1, change >> (1 + _SIDE)
        lines, inside_lines = self._moved(pool.shape[1], down)  # [..., height]
        columns, inside_columns = self._moved(pool.shape[2], right)  # [..., width]
        columns = torch.where(mirror[..., None] > 0, pool.shape[2] - 1 - columns, columns)
        x = pool[point[..., None, None], lines[..., :, None], columns[..., None, :]]
        if not self.shift:
            return x
        inside = inside_lines[..., :, None] & inside_columns[..., None, :]
        return torch.where(inside[..., None], x, pool[point, 0, 0][..., None, None, :])

    def _moved(self, side: int, by: Tensor) -> tuple[Tensor, Tensor]:
        """Along one side: which pixel comes where, and whether there is one."""
        moved = torch.arange(side, device=by.device) + (by & 2**_SIDE - 1)[..., None] - self.shift
        return moved.clamp(0, side - 1), (moved >= 0) & (moved < side)
