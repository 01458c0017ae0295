"""A user's numbers as tensors, and whether the axes of images are in order."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.errors import DataError, shorten
from flowdup.memory import check_memory


def as_tensor(value: Any, what: str) -> Tensor:
    """Numbers in a tensor, an array or (nested) lists as a dense tensor; DataError if they are not.

    Nothing is copied that torch can read as it is.
    """
    if not isinstance(value, Tensor):
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f"{what} are no array ({shorten(error, 200)}): give every point the same shape"
            ) from None
        if array.dtype.kind not in "biuf":
            raise DataError(f"{what} must be numbers, not {array.dtype}: give a tensor or an array")
        width = min(array.dtype.itemsize, 8)  # in bytes; torch knows no longdouble
        kind = np.dtype(f"{array.dtype.kind}{width}")  # nor C's long long beside its long
        if kind.num != array.dtype.num or kind != array.dtype or min(array.strides, default=0) < 0:
            with np.errstate(over="ignore"):  # becomes infinite, which is refused
                array = array.astype(kind)
        value = torch.from_numpy(array)
    if value.layout != torch.strided or value.device.type == "meta":
        raise DataError(
            f"{what} are {shorten(str(value.layout))} on {value.device}: give a dense tensor, "
            "for instance by to_dense()"
        )
    tensor: Tensor = value.detach() if value.requires_grad else value
    return tensor


def as_inputs(x: NDArray[Any], where: str) -> Tensor:
    """A stored array as inputs [n, ...]: uint8 stays as it is, other numbers become float32."""
    if x.dtype.kind not in "biuf":
        raise DataError(f"{where} has inputs of type {x.dtype}: store them as numbers")
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise DataError(
            f"{where} has inputs of shape {x.shape}: store an array with one row per point, of at "
            "least one number"
        )
    if x.dtype != np.uint8:
        check_memory(4 * x.size, where, "split the client's points among several", DataError)
    with np.errstate(over="ignore"):  # becomes infinite, which InputSpec.check reports
        return torch.from_numpy(np.array(x, np.uint8 if x.dtype == np.uint8 else np.float32))


def listed(names: Iterable[str]) -> str:
    """Names for a sentence, cut if they are many."""
    return shorten(", ".join(names), 300) or "nothing"


def type_name(tensor: Tensor) -> str:
    """The tensor's type without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def looks_channels_last(shape: Sequence[int], square: bool = True) -> bool:
    """Whether a shape is likely [height, width, channels], where networks read channels first.

    Sensors may have such shapes, too; `square` takes only images as high as wide for certain.
    """
    if len(shape) != 3 or shape[2] not in (1, 3, 4) or min(shape[:2]) < 8:
        return False
    return shape[0] == shape[1] or not square


def looks_gray(shape: Sequence[int], dtype: str) -> bool:
    """Whether inputs are likely gray images [height, width] without an axis of channels: bytes, as
    sensors hardly give them.
    """
    return len(shape) == 2 and min(shape) >= 8 and dtype == "uint8"


def channels_last_sentence(shape: Sequence[int]) -> str:
    """What is wrong with images whose channels come last, and what to do."""
    return (
        f"images of shape {tuple(shape)} look like [height, width, channels], and channels first "
        "is what is read: move the last axis of x to the front, x.transpose(0, 3, 1, 2) in NumPy"
    )


def shape_sentence(who: str, shape: Sequence[int], expected: Sequence[int]) -> str:
    """What is wrong with a client's inputs of another shape than is read, and what to do."""
    given, wanted = tuple(shape), tuple(expected)
    if len(wanted) == 3 and len(given) == 3 and given[:2] == wanted[1:] != given[1:]:
        return f"{who}'s {channels_last_sentence(given)}"
    if len(wanted) == 3 and given[-2:] == wanted[1:]:
        if len(given) == 2:
            return (
                f"{who} has images of shape {given} without channels, and {wanted} is what is "
                "read: add the axis of channels, x[:, None] in NumPy"
            )
        if len(given) == 3:
            channels = f"{given[0]} channel{'s' if given[0] != 1 else ''}"
            return (
                f"{who} has images of shape {given}, of {channels}, and {wanted[0]} is "
                "what is read: convert them, for instance by Pillow's Image.convert"
            )
    return (
        f"{who} has inputs of shape {given}, the federation reads {wanted}: convert them (channels "
        "come first)"
    )
