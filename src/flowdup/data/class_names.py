"""Names of classes, and labels that a file has as text: numbers of classes, or their names."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.errors import DataError, shorten

CLASSES_ONLY = "flowdup is for classification only"
RANGES = "store classes, whole numbers from 0 on or names; a measured target could be cut in ranges"

_LONGEST = 1000  # letters of a name
_MOST_DIGITS = 20  # of a name that is sorted as a number; Python reads no number of thousands
_MOST = 2**31  # classes
_MISSING = ("", "nan", "na", "n/a", "null", "none")  # how files write that a point has no label


def check_class_names(names: Any, classes: int) -> tuple[str, ...]:
    """The names, one per class or none; DataError if they are anything else."""
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise DataError(f"class names are {shorten(names)}: give a tuple of texts")
    right = all(isinstance(name, str) and 0 < len(name) <= _LONGEST for name in names)
    if not right or len(names) not in (0, classes) or len({*names}) < len(names):
        raise DataError(
            f"{shorten(list(names))} cannot name {classes} classes: give one text of {_LONGEST} "
            "letters at most for each, no two the same"
        )
    return tuple(names)


def sort_names(names: Collection[str]) -> tuple[str, ...]:
    """In the order of the alphabet, or of the numbers if all are whole numbers."""
    numbers = all(n.isascii() and n.isdecimal() and len(n) < _MOST_DIGITS for n in names)
    return tuple(sorted(names, key=lambda n: (int(n) if numbers else 0, n)))


def are_codes(labels: Collection[int]) -> bool:
    """Whether whole numbers that occur as labels are codes, such as 3, 17 and 401: at least half of
    the numbers up to the largest do not occur.
    """
    return len(labels) > 1 and min(labels) >= 0 and 2 * len(labels) <= max(labels) + 1


def are_names_of_codes(names: Sequence[str]) -> bool:
    """Whether these are names that codes got, by which other labels are known that are numbers."""
    if not all(n.isascii() and n.isdecimal() and len(n) < _MOST_DIGITS for n in names):
        return False
    numbers = {int(name) for name in names}
    return [*map(str, sorted(numbers))] == [*names] and are_codes(numbers)


def read_labels(
    texts: Iterable[Sequence[str] | None], where: str, numbers: bool = True
) -> tuple[list[Tensor | None], tuple[str, ...]]:
    """Labels of clients, of each one text per point or None, and the names of the classes.

    With `numbers`, and where all are whole numbers, these are the labels, and there are no names;
    other texts are names, sorted over all clients.  A point without a text gets -1, and with
    `numbers` one with a word for none (NA, null, ...).
    """
    clients = [None if own is None else [*map(_plain, own)] if numbers else own for own in texts]
    found = {text for own in clients if own is not None for text in own} - {""}
    values = [_number(text) for text in found] if numbers else [None]
    if found and None not in values:
        if broken := [n for n in values if n is not None and n != int(n)]:
            raise DataError(f"{where} has the label {broken[0]}: {CLASSES_ONLY}, so {RANGES}")
        if outside := [n for n in values if n is not None and not -1 <= n < _MOST]:
            raise _outside(where, outside[0])
        code = {text: int(float(text)) for text in found}
        return [_coded(own, code) for own in clients], ()
    names = sort_names(found)
    code = {name: number for number, name in enumerate(names)}
    return [_coded(own, code) for own in clients], names


def read_float_labels(y: NDArray[Any], where: str) -> Tensor:
    """Whole numbers that are stored as floats, NaN as -1; DataError if one is something else."""
    with np.errstate(over="ignore"):  # of what is too large for float64, as infinite
        numbers = np.where(np.isnan(y), -1, y).astype(np.float64)
    if len(broken := numbers[~np.isfinite(numbers) | (numbers != np.floor(numbers))]):
        raise DataError(f"{where} has the label {broken[0]:g}: {CLASSES_ONLY}, so {RANGES}")
    if len(outside := numbers[(numbers < -1) | (numbers >= _MOST)]):
        raise _outside(where, float(outside[0]))
    return torch.from_numpy(numbers.astype(np.int64))


def words_for_none(texts: Iterable[Sequence[str] | None]) -> list[str]:
    """Those among texts of labels that are read as no label, as they are written."""
    found = {text.strip() for own in texts if own is not None for text in {*own}}
    return sorted(text for text in found if text and not _plain(text))


def _outside(where: str, label: float) -> DataError:
    return DataError(
        f"{where} has the label {label:.0f}: store whole numbers from 0 on, and nothing or -1 for "
        "no label"
    )


def _coded(texts: Sequence[str] | None, code: dict[str, int]) -> Tensor | None:
    if texts is None:
        return None
    return torch.from_numpy(np.array([code.get(text, -1) for text in texts], np.int64))


def _plain(text: str) -> str:
    text = text.strip()
    return "" if text.lower() in _MISSING else text


def _number(text: str) -> float | None:
    """A finite number, as a table or a program writes it."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
