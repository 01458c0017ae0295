"""Augmentation: training images mirrored, shifted and rotated at random, by the seed.

Mirroring and shifting are drawn for every image, and a model learns to ignore them.  Rotations are
drawn for every batch: it looks like one of a client whose images are rotated, and a method that
makes a model of a batch learns to make models for such clients.

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
_TURNS = 1 + 2 * _SIDE  # where the bits for quarter turns begin


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images that keep their labels: mirrored, moved, rotated.

    Where an image leaves a side free, its corner's colour comes in: a background stays what it is,
    be it black or white.
    """

    mirror: bool = False  # half of the images, left and right exchanged
    shift: int = 0  # by up to so many pixels in each direction
    rotate_batches: bool = False  # all images of a batch by the same 0 to 3 quarter turns

    def __post_init__(self) -> None:
        check_range("client.shift", self.shift, 0, 2 ** (_SIDE - 1) - 1)

    def __bool__(self) -> bool:
        return self.mirror or self.rotate_batches or self.shift > 0

    def check(self, x: Tensor) -> None:
        """Refuse points [points, *shape] that cannot be changed so."""
        if x.ndim != 4:
            raise ConfigError(
                "client.mirror, client.shift and client.rotate_batches are for images, and an "
                f"input has {x.ndim - 1} dimensions: switch them off"
            )
        if self.rotate_batches and x.shape[2] != x.shape[3]:
            raise ConfigError(
                f"client.rotate_batches is for square images, and these have {x.shape[2]} x "
                f"{x.shape[3]} pixels: switch it off"
            )
        if self.shift >= (side := min(x.shape[2:])):
            raise ConfigError(
                f"client.shift = {self.shift} would move images of {side} pixels out of sight: "
                f"choose less than {side}"
            )
        if x.shape[0] > POINT:
            raise ConfigError(
                "client.mirror, client.shift and client.rotate_batches are for at most "
                f"{POINT:,} points at once, and there are {x.shape[0]:,}: switch them off"
            )

    def changes(self, image_words: Words, batch_words: Words) -> NDArray[np.int64]:
        """Random changes as the upper bits of rows, of every image by `image_words` [..., B] and of
        every batch by `batch_words` [...].
        """
        drawn, places = image_words.astype(np.int64), 2 * self.shift + 1
        down = (drawn >> 1 & 0x7FFF) * places >> 15
        right = (drawn >> 16) * places >> 16
        change = (drawn & 1 if self.mirror else 0) | down << 1 | right << (1 + _SIDE)
        if self.rotate_batches:
            change |= (batch_words.astype(np.int64) >> 30 << _TURNS)[..., None]
        return change << 32

    def images(self, pool: Tensor, rows: Tensor) -> Tensor:
        """Images of a pool [points, height, width, channels] in these rows, changed."""
        point, change = rows & POINT, rows >> 32
        mirror, down, right = change & 1, change >> 1, change >> (1 + _SIDE)
        lines, inside_lines = self._moved(pool.shape[1], down)  # [..., height]
        columns, inside_columns = self._moved(pool.shape[2], right)  # [..., width]
        columns = torch.where(mirror[..., None] > 0, pool.shape[2] - 1 - columns, columns)
        x = pool[point[..., None, None], lines[..., :, None], columns[..., None, :]]
        if self.shift:
            inside = inside_lines[..., :, None] & inside_columns[..., None, :]
            x = torch.where(inside[..., None], x, pool[point, 0, 0][..., None, None, :])
        return _rotated(x, quarter_turns(rows)) if self.rotate_batches else x

    def _moved(self, side: int, by: Tensor) -> tuple[Tensor, Tensor]:
        """Along one side: which pixel comes where, and whether there is one."""
        moved = torch.arange(side, device=by.device) + (by & 2**_SIDE - 1)[..., None] - self.shift
        return moved.clamp(0, side - 1), (moved >= 0) & (moved < side)


def quarter_turns(rows: Tensor) -> Tensor:
    """0 to 3, by which the images in rows of a plan are rotated."""
    return rows >> 32 + _TURNS


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Square images [..., side, side, channels], each by so many quarter turns [...]."""
    for bit in (1, 2):
        rotated = torch.rot90(x, bit, (-3, -2))
        x = torch.where((turns & bit)[..., None, None, None] > 0, rotated, x)
    return x
