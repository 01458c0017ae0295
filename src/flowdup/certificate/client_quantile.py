"""How many clients have an error of at most e: order statistics over held-out clients.

Assumes what `held_out_clients` assumes.  With e_(1) <= ... <= e_(n) the sorted errors of n clients
and F(e) the share of all clients with an error of at most e, each with probability 1 - delta:

    F(e_(k)) >= s, where P(Binomial(n, s) >= k) = delta      exact, for one k chosen beforehand
    F(e) >= F_n(e) - sqrt(ln(1 / delta) / (2 n)) for all e   DKW, Massart 1990, delta <= 1/2

The first is what a sentence about one share uses, the second a whole curve at once.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from flowdup.certificate.checks import check_delta, check_losses
from flowdup.certificate.kl import largest
from flowdup.errors import CertificateError


class CurvePoint(NamedTuple):
    """That so large a share of clients has an error of at most `error`."""

    error: float
    share: float  # exact, if only this error is looked at
    share_at_once: float  # DKW, for all errors together


def error_of_share(errors: Sequence[float], share: float, delta: float) -> float:
    """The least e of which we are confident that at least `share` of all clients have e or less."""
    found = sorted(check_losses(errors).tolist())
    for k, error in enumerate(found, 1):
        if binomial_tail(k, len(found), share) <= delta:
            return float(error)
    raise CertificateError(
        f"{len(found)} clients cannot tell with confidence {1 - delta:g} what {share:.0%} of all "
        f"clients have: set at least {clients_needed(share, delta)} aside, or ask for a smaller "
        "share"
    )


def share_bound(k: int, clients: int, delta: float) -> float:
    """s with P(Binomial(n, s) >= k) = delta: with confidence, F(e_(k)) is at least s."""
    check_delta(delta)
    if not 1 <= k <= clients:
        raise CertificateError(f"there is no client number {k} of {clients}: choose one of them")
    return 1 - largest(lambda rest: binomial_tail(k, clients, 1 - rest) > delta, 0.0, 1.0)


def share_curve(errors: Sequence[float], delta: float) -> list[CurvePoint]:
    """For every error that occurs, how large a share of all clients has at most this error."""
    found = sorted(check_losses(errors).tolist())
    margin = dkw_margin(len(found), delta)
    last = {error: k for k, error in enumerate(found, 1)}
    return [
        CurvePoint(e, share_bound(k, len(found), delta), max(k / len(found) - margin, 0.0))
        for e, k in last.items()
    ]


def dkw_margin(clients: int, delta: float) -> float:
    """sqrt(ln(1 / delta) / (2 n)), one-sided."""
    check_delta(delta)
    if delta > 0.5:
        raise CertificateError(f"delta is {delta}: the one-sided DKW bound needs 0.5 or less")
    return math.sqrt(math.log(1 / delta) / (2 * clients))


def clients_needed(share: float, delta: float) -> int:
    """The least n with share^n <= delta: fewer clients say nothing about so large a share."""
    check_delta(delta)
    if not 0 < share < 1:
        raise CertificateError(f"a share of {share} cannot be certified: give one between 0 and 1")
    needed = math.ceil(math.log(delta) / math.log(share))
    return needed if share**needed <= delta else needed + 1


def binomial_tail(k: int, n: int, p: float) -> float:
    """P(Binomial(n, p) >= k)."""
    if k <= 0:
        return 1.0
    if p <= 0 or p >= 1:
        return float(p >= 1)
    a, b, logs = math.log(p), math.log1p(-p), _log_binomials(n)
    return min(math.fsum(math.exp(logs[j] + j * a + (n - j) * b) for j in range(k, n + 1)), 1.0)


@lru_cache(maxsize=8)
def _log_binomials(n: int) -> list[float]:
    """Logarithms of n over j, of exact whole numbers."""
    number, logs = 1, [0.0]
    for j in range(n):
        number = number * (n - j) // (j + 1)
        logs.append(math.log(number))
    return logs
