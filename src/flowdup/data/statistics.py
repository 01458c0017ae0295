"""Mean and standard deviation of inputs per channel, over clients that give sums and no data."""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from flowdup.data.clients import ClientData, LazyClients
from flowdup.data.input_spec import InputSpec
from flowdup.data.tensors import listed
from flowdup.errors import DataError

_LOG = logging.getLogger(__name__)
_CHUNK = 2**22  # numbers of a client that are read at once, as float64
_DIGITS = 6  # of std, and of mean as far as std has them: sums differ in the last of 16
_ROUNDING = 1e-7  # the relative error of float32: what varies by less does not vary
_OFFSET = 1e6  # times std: from such a mean on, float32 rounds the rest by 2% of std and more
_LARGEST = 1e30  # that `InputSpec` reads


@dataclass(frozen=True)
class ChannelSums:
    """What a client tells of its inputs: per channel how many numbers, their sum, and the sum of
    the squares of their differences from their mean (plain squares would cancel).
    """

    count: int
    total: Tensor  # [channels] float64
    squares: Tensor  # [channels] float64

    @classmethod
    def of(cls, x: Tensor) -> "ChannelSums":
        """Of a client's points x [n, channels, ...], uint8 as numbers from 0 to 1."""
        return combine(_chunk_sums(x))

    def __add__(self, other: "ChannelSums") -> "ChannelSums":
        """Of both (Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
        Sample Variances", 1979).
        """
        count = self.count + other.count
        apart = other.total / other.count - self.total / self.count
        between = apart**2 * (self.count * other.count / count)
        return ChannelSums(count, self.total + other.total, self.squares + other.squares + between)

    def varying(self) -> list[bool]:
        """Whether a channel's numbers differ, by more than float32 rounds them."""
        std = (self.squares / self.count).sqrt()
        return [bool(found) for found in std > self._rounding().clamp(min=1 / _LARGEST)]

    def _rounding(self) -> Tensor:
        """By how much float32 may round a channel's numbers."""
        return _ROUNDING * self.total.abs() / self.count

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Per channel; one that does not vary has the standard deviation 1, or what float32 may
        round if that is more.
        """
        means: list[float] = []
        deviations: list[float] = []
        sums = (self.total.tolist(), self.squares.tolist())
        noise = self._rounding().clamp(min=1.0).tolist()
        for total, squares, varies, least in zip(*sums, self.varying(), noise, strict=True):
            mean, std = total / self.count, math.sqrt(squares / self.count)
            if abs(mean) > _LARGEST or std > _LARGEST:
                raise DataError(
                    f"channel {len(means)} of the inputs has the mean {mean:.2g} and the standard "
                    f"deviation {std:.2g}: scale the inputs to numbers that float32 can hold"
                )
            if not varies:
                std = least
            places = _DIGITS - 1 - math.floor(math.log10(std))
            means.append(round(mean, places))
            deviations.append(round(std, places))
        return tuple(means), tuple(deviations)


def combine(sums: Iterable[ChannelSums]) -> ChannelSums:
    """The sums of all clients together."""
    return reduce(ChannelSums.__add__, sums)


def offset_sentence(
    mean: Sequence[float], std: Sequence[float], columns: Sequence[str] = ()
) -> str:
    """Which channels lose their digits as float32, for they differ little beside their size; empty
    if none does.
    """
    found = [i for i, (m, s) in enumerate(zip(mean, std, strict=True)) if abs(m) >= _OFFSET * s]
    if not found:
        return ""
    names = columns if len(columns) == len(mean) else [*map(str, range(len(mean)))]
    return (
        f"inputs {listed(names[i] for i in found)} differ by a millionth of their size "
        f"({mean[found[0]]:.2g}) or less, and as float32, which inputs are kept as, they lose "
        "these digits"
    )


OFFSET_REMEDY = (
    "take the same number off all values of such an input, in every file, before they are stored, "
    "or leave the input out"
)


def with_statistics(spec: InputSpec, clients: Sequence[ClientData]) -> InputSpec:
    """The same with mean and std of the clients' inputs, which `spec` must have checked.

    Lazy clients would all have to be made for it: of these, inputs stay as they are.
    """
    if isinstance(clients, LazyClients):
        _LOG.warning(
            "inputs of lazy clients are not normalised, since all would have to be made for it: "
            "set data.mean and data.std"
        )
        return spec
    mean, std = combine(ChannelSums.of(client.x) for client in clients).mean_and_std()
    return replace(spec, mean=mean, std=std)


def _chunk_sums(x: Tensor) -> Iterator[ChannelSums]:
    points = max(1, _CHUNK // x[0].numel())
    for chunk in torch.split(x, points):
        numbers = chunk.double().flatten(2) if chunk.ndim > 2 else chunk.double()[..., None]
        numbers = numbers / 255 if x.dtype == torch.uint8 else numbers  # [n, channels, rest]
        total = numbers.sum((0, 2))
        count = numbers.shape[0] * numbers.shape[2]
        squares = ((numbers - (total / count)[:, None]) ** 2).sum((0, 2))
        yield ChannelSums(count, total, squares)
