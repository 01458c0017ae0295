"""A prior by compression: what has a short code is likely beforehand.

Numbers are replaced by one of L values (Lloyd's quantiser), stored as float16, and their indices
coded arithmetically by how often each occurs.  For any prefix code, pi(psi) >= 2^-length, so that

    KL(psi || pi) <= length ln 2,   length = N H + 2 + 16 L + L ceil(log2(N + 1)) + 2 log2(L) + 3

bits, with H the entropy of the indices: code, codebook, counts, and L itself (Elias gamma).  As in
Zhou et al., ICLR 2019, and Lotfi et al., NeurIPS 2022.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flowdup.certificate.checks import Numbers
from flowdup.errors import CertificateError

_STEPS = 20
_FITTED = 2**19  # numbers at most, of more every so many-th


class Code(NamedTuple):
    """Quantised numbers and how long they are when coded."""

    values: Numbers
    nats: float


def compress(numbers: ArrayLike, levels: int) -> Code:
    """Numbers [n] with at most so many different values."""
    given = np.asarray(numbers, np.float64).reshape(-1)
    if levels < 1 or not given.size or not np.isfinite(given).all():
        raise CertificateError("finite numbers and at least one level are needed to code them")
    book, index = _lloyd(given, levels)
    counts = np.bincount(index, minlength=book.size)
    return Code(book[index], code_length(counts.tolist()))


def code_length(counts: list[int]) -> float:
    """In nats, of indices that occur so often; the formula of this file."""
    total, levels = sum(counts), len(counts)
    shares = [c / total for c in counts if c]
    entropy = -math.fsum(s * math.log2(s) for s in shares)
    book = 16 * levels + levels * math.ceil(math.log2(total + 1)) + 2 * math.log2(levels) + 3
    return (total * entropy + 2 + book) * math.log(2)


def _lloyd(given: Numbers, levels: int) -> tuple[Numbers, NDArray[np.int64]]:
    """A codebook in float16, fitted to some of the numbers, and which of its values each has."""
    places = (np.arange(levels) + 0.5) / levels
    some = given[:: -(-given.size // _FITTED)]
    book = np.unique(np.quantile(some, places).astype(np.float16)).astype(np.float64)
    for _ in range(_STEPS):
        index = _nearest(some, book)
        counts = np.bincount(index, minlength=book.size)
        sums = np.bincount(index, some, book.size)
        means = sums[counts > 0] / counts[counts > 0]
        book = np.unique(means.astype(np.float16)).astype(np.float64)
    return book, _nearest(given, book)


def _nearest(given: Numbers, book: Numbers) -> NDArray[np.int64]:
    return np.searchsorted((book[1:] + book[:-1]) / 2, given)
