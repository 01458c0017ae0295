"""Augmentation: training images mirrored, shifted and warped at random, by the seed.

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
_ENTRY = 3  # bits for an entry of the matrix that warps


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images that keep their labels.

    Where an image leaves a side free, the pixels at its border are repeated: a background stays
    what it is, be it black or white.
    """

    mirror: bool = False  # half of the images, left and right exchanged
    shift: int = 0  # by up to so many pixels in each direction
    warp: float = 0.0  # turned, sheared and scaled: by a matrix off 1 by up to this in every entry

    def __post_init__(self) -> None:
        check_range("client.shift", self.shift, 0, 2 ** (_SIDE - 1) - 1)
        check_range("client.warp", self.warp, 0, 0.5)

    def __bool__(self) -> bool:
        return self.mirror or self.shift > 0 or self.warp > 0

    def check(self, x: Tensor) -> None:
        """Refuse points [points, *shape] that cannot be changed so."""
        if x.ndim != 4:
            raise ConfigError(
                "client.mirror, client.shift and client.warp are for images, and an input has "
                f"{x.ndim - 1} dimensions: switch them off"
            )
        if self.shift >= (side := min(x.shape[2:])):
            raise ConfigError(
                f"client.shift = {self.shift} would move images of {side} pixels out of sight: "
                f"choose less than {side}"
            )
        if x.shape[0] > POINT:
            raise ConfigError(
                f"client.mirror, client.shift and client.warp are for at most {POINT:,} points at "
                f"once, and there are {x.shape[0]:,}: switch them off"
            )

    def changes(self, words: Words) -> NDArray[np.int64]:
        """A random change for every word, as the upper bits of a row."""
        drawn, places = words.astype(np.int64), 2 * self.shift + 1
        down = (drawn >> 1 & 0x7FFF) * places >> 15
        right = (drawn >> 16) * places >> 16
        change = (drawn & 1 if self.mirror else 0) | down << 1 | right << (1 + _SIDE)
        if self.warp:  # by the lower bits of both halves, where shifts read the upper ones
            matrix = (drawn >> 1 & 0x3F) | (drawn >> 16 & 0x3F) << 2 * _ENTRY
            change |= matrix << (1 + 2 * _SIDE)
        return change << 32

    def images(self, pool: Tensor, rows: Tensor) -> Tensor:
        """Images of a pool [points, height, width, channels] in these rows, changed."""
        point, change = rows & POINT, rows >> 32
        mirror, down, right = change & 1, change >> 1, change >> (1 + _SIDE)
        lines = self._moved(pool.shape[1], down)[..., :, None]  # [..., height, 1]
        columns = self._moved(pool.shape[2], right)[..., None, :]  # [..., 1, width]
        if self.warp:
            lines, columns = self._warped(pool, lines, columns, change >> (1 + 2 * _SIDE))
        flipped = mirror[..., None, None] > 0
        columns = torch.where(flipped, pool.shape[2] - 1 - columns, columns)
        point = point[..., None, None]
        if not self.warp:
            return _pixels(pool, point, lines, columns)
        above, left = lines.floor(), columns.floor()
        weights = (lines - above)[..., None], (columns - left)[..., None]
        mixed = [
            torch.lerp(*(_pixels(pool, point, a, b).float() for b in (left, left + 1)), weights[1])
            for a in (above, above + 1)
        ]
        x = torch.lerp(mixed[0], mixed[1], weights[0])
        return x if pool.is_floating_point() else x.round().to(pool.dtype)

    def _moved(self, side: int, by: Tensor) -> Tensor:
        """Along one side: which pixel comes where."""
        return torch.arange(side, device=by.device) + (by & 2**_SIDE - 1)[..., None] - self.shift

    def _warped(
        self, pool: Tensor, lines: Tensor, columns: Tensor, drawn: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Places [..., height, width] between pixels, around an image's middle."""
        middle = (pool.shape[1] - 1) / 2, (pool.shape[2] - 1) / 2
        down, right = lines - middle[0], columns - middle[1]
        most = 2**_ENTRY - 1
        a, b, c, d = (
            self.warp * (2 * (drawn >> i * _ENTRY & most) / most - 1)[..., None, None]
            for i in range(4)
        )
        return lines + a * down + b * right, columns + c * down + d * right


def _pixels(pool: Tensor, point: Tensor, lines: Tensor, columns: Tensor) -> Tensor:
    """Of images, at these places, or where the border is nearest."""
    height, width = pool.shape[1:3]
    return pool[point, lines.clamp(0, height - 1).long(), columns.clamp(0, width - 1).long()]
