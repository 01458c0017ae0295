"""What every client's inputs look like, and how a model reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowdup.data.class_names import CLASSES_ONLY, check_class_names
from flowdup.data.clients import ClientData
from flowdup.data.tensors import as_tensor, listed, shape_sentence, type_name
from flowdup.data.traits import check_traits
from flowdup.errors import ConfigError, DataError, shorten

_MOST_NUMBERS = 2**26  # of one input


@dataclass(frozen=True)
class InputSpec:
    """What every client's inputs must look like, and how they become floats.

    uint8 inputs are divided by 255; then mean is taken off and the rest divided by std, per channel
    (per first dimension of `shape`).
    """

    shape: tuple[int, ...]
    dtype: str  # uint8 or float32
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    class_names: tuple[str, ...] = ()  # of class 0, 1, ...; empty: they have none
    columns: tuple[str, ...] = ()  # of a table, one for each number; empty: these have no names

    def __post_init__(self) -> None:
        shape = self.shape
        right = isinstance(shape, tuple) and all(type(size) is int and size > 0 for size in shape)
        if not right or not shape or prod(shape) > _MOST_NUMBERS:
            raise DataError(
                f"inputs cannot have the shape {shorten(shape)}: give a tuple of sizes of at least "
                f"1 and {_MOST_NUMBERS:,} numbers at most"
            )
        if self.dtype not in ("uint8", "float32"):
            raise DataError(f"inputs are uint8 or float32, not {shorten(self.dtype)}: choose one")
        if type(self.classes) is not int or not 1 <= self.classes < 2**31:
            raise DataError(
                f"there cannot be {shorten(self.classes)} classes: give a whole number from 1 on"
            )
        object.__setattr__(self, "class_names", check_class_names(self.class_names, self.classes))
        object.__setattr__(self, "columns", _check_columns(self.columns, prod(shape)))
        mean, std = self.mean, self.std
        if not isinstance(mean, Sequence) or not isinstance(std, Sequence):
            raise DataError(f"mean and std are {shorten(mean)} and {shorten(std)}: give tuples")
        if len(mean) != len(std) or len(mean) not in (0, 1, shape[0]):
            raise DataError("mean and std need one number each, or one per channel, or none")
        if not all(map(_readable, mean, std)):
            raise DataError(
                f"inputs cannot be read with mean {shorten(mean)} and std {shorten(std)}: "
                "give finite numbers, std above 0"
            )
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))

    def with_names(self, other: "InputSpec") -> "InputSpec":
        """The same with names of classes and columns that it lacks and the other has."""
        class_names = self.class_names or other.class_names
        return replace(self, class_names=class_names, columns=self.columns or other.columns)

    def read_as(self, other: "InputSpec") -> "InputSpec":
        """The same with the other's mean and std."""
        return replace(self, mean=other.mean, std=other.std)

    def check(self, client: ClientData) -> ClientData:
        """The client, with x and y in the right types; DataError if it does not fit."""
        who = f"client '{shorten(client.name)}'" if client.name else "the client"
        x = as_tensor(client.x, f"{who}'s inputs")
        y = None if client.y is None else as_tensor(client.y, f"{who}'s labels")
        if x.ndim < 2:
            raise DataError(
                f"{who} has inputs of shape {tuple(x.shape)}: give an array with one row per point"
            )
        if len(x) == 0:
            raise DataError(f"{who} is empty: give it at least one point or leave it out")
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(shape_sentence(who, x.shape[1:], self.shape))
        if self.dtype == "uint8" and x.dtype != torch.uint8:
            raise DataError(
                f"{who} has inputs of type {type_name(x)}, the federation reads uint8 "
                "images (0 to 255): convert them"
            )
        if self.dtype != "uint8":
            if x.dtype == torch.uint8 or x.is_complex():
                raise DataError(
                    f"{who} has {type_name(x)} inputs, the federation reads floats: convert them"
                )
            x = x.to(torch.float32)
            if not all(bool(torch.isfinite(part).all()) for part in torch.split(x, 4096)):
                raise DataError(f"{who} has NaN or infinite inputs: clean or drop these points")
        y = None if y is None else self._check_labels(y, x, who)
        return replace(client, x=x, y=y, traits=check_traits(client.name, client.traits, who))

    def _check_labels(self, y: Tensor, x: Tensor, who: str) -> Tensor:
        if y.is_floating_point():
            raise DataError(
                f"{who} has labels of type {type_name(y)}: {CLASSES_ONLY}, so give one whole "
                f"number per point ({x.shape[0]}), its class"
            )
        if y.is_complex() or y.shape != x.shape[:1]:
            raise DataError(
                f"{who} has labels of type {type_name(y)} and shape {tuple(y.shape)}: give one "
                f"whole number per point ({x.shape[0]})"
            )
        unsigned, y = y.dtype == torch.uint64, y.to(torch.int64)
        if unsigned and bool((y < 0).any()):  # 2^63 and more, as it would be read
            raise DataError(
                f"{who} has labels of 2^63 and more: they must lie between 0 and {self.classes - 1}"
            )
        low, high = int(y.min()), int(y.max())
        if low < -1 or high >= self.classes:
            raise DataError(
                f"{who} has labels from {low} to {high}: they must lie between 0 and "
                f"{self.classes - 1}, or be -1 for a point without a label"
            )
        return y

    def reader(self) -> "Reader":
        """The module that makes floats of inputs as they are stored."""
        return Reader(self)


def check_names(spec: InputSpec, given: tuple[str, ...], source: str) -> tuple[str, ...]:
    """The names of the classes: those that the data have, or that a setting gives to numbers."""
    if given and spec.class_names not in ((), given):
        raise ConfigError(
            f"data.source = '{source}' names its classes itself ({listed(spec.class_names)}): set "
            "data.class_names = []"
        )
    if given and len(given) != spec.classes:
        raise ConfigError(
            f"data.class_names has {len(given)} names and there are {spec.classes} classes: give "
            "one for each"
        )
    return spec.class_names or given


class Reader(nn.Module):
    """How networks read stored inputs [n, *shape]: one product and one sum per channel.

    For images that lie pixel by pixel the numbers do so, too, which makes one long loop of it.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, inputs: InputSpec) -> None:
        super().__init__()
        unit = 1 / 255 if inputs.dtype == "uint8" else 1.0
        mean, std = inputs.mean or (0.0,), inputs.std or (1.0,)
        per_channel = (-1, *(1 for _ in inputs.shape[1:]))
        scale = torch.tensor([unit / s for s in std]).reshape(per_channel)
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).reshape(per_channel)
        if len(inputs.shape) == 3:
            scale, shift = (
                t.expand(inputs.shape).movedim(0, -1).contiguous().movedim(-1, 0)
                for t in (scale, shift)
            )
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs as stored [n, *shape] as normalised floats, on the device of the module."""
        scale, shift = self.scale, self.shift
        if scale.ndim == 3 and x.is_contiguous():  # channel by channel
            scale, shift = scale[:, :1, :1], shift[:, :1, :1]
        return x.to(scale.device, scale.dtype) * scale + shift


def _check_columns(columns: Any, numbers: int) -> tuple[str, ...]:
    if not isinstance(columns, Sequence) or isinstance(columns, str):
        raise DataError(f"columns are {shorten(columns)}: give a tuple of texts")
    if len(columns) not in (0, numbers) or not all(isinstance(name, str) for name in columns):
        raise DataError(
            f"{shorten(list(columns))} cannot name inputs of {numbers} numbers: give one text for "
            "each"
        )
    return tuple(columns)


def _readable(mean: Any, std: Any) -> bool:
    """Whether inputs minus mean, divided by std, are finite in float32."""
    numbers: Any = (int, float, np.integer, np.floating)
    if not isinstance(mean, numbers) or not isinstance(std, numbers):
        return False
    if not (abs(mean) <= 1e30 and 1e-30 <= std <= 1e30):
        return False
    return abs(float(mean)) / float(std) <= 1e30
