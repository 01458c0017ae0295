"""What every certificate asks of its arguments; a sentence where it cannot be given."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flowdup.errors import CertificateError

Numbers = NDArray[np.float64]


def check_delta(delta: float) -> None:
    """Refuse a share of failures outside (0, 1)."""
    if not 0 < delta < 1:
        raise CertificateError(
            f"delta is {delta}: give the share of failures that is allowed, above 0 and below 1"
        )


def check_shares(**shares: float) -> None:
    """Refuse coverages and shares of clients outside (0, 1)."""
    for name, share in shares.items():
        if not 0 < share < 1:
            raise CertificateError(f"{name} is {share}: give a share above 0 and below 1")


def check_losses(losses: ArrayLike) -> Numbers:
    """Losses as an array; refused if there are none or one lies outside [0, 1]."""
    found = np.asarray(losses, np.float64).reshape(-1)
    if not found.size:
        raise CertificateError("there are no losses to bound: give at least one client's")
    if not ((found >= 0) & (found <= 1)).all():  # False for NaN
        low, high = found.min(), found.max()
        raise CertificateError(
            f"losses lie between {low:g} and {high:g}, and the bounds are for losses in [0, 1]: "
            "use the share of wrong predictions, or a loss clipped to [0, 1]"
        )
    return found


def check_positive(**numbers: float) -> None:
    """Refuse variances, sizes and counts that are not above 0."""
    for name, number in numbers.items():
        if not 0 < number < np.inf:
            raise CertificateError(f"{name} is {number}: give a finite number above 0")


def check_not_negative(**numbers: float) -> None:
    """Refuse divergences and squared norms below 0."""
    for name, number in numbers.items():
        if not 0 <= number < np.inf:
            raise CertificateError(f"{name} is {number}: give a finite number of at least 0")


def harmonic_mean(sizes: Sequence[int]) -> float:
    """n / sum of 1 / m_i: the m of Hoeffding's lemma where clients have m_i points each."""
    if not sizes or min(sizes) < 1:
        raise CertificateError("every client needs at least one point: leave empty ones out")
    if min(sizes) == max(sizes):
        return float(sizes[0])  # without rounding
    return len(sizes) / math.fsum(1 / size for size in sizes)
