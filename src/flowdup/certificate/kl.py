"""The binary Kullback-Leibler divergence and its inversion: Chernoff's bound for losses in [0, 1].

    kl(q || p) = q ln(q / p) + (1 - q) ln((1 - q) / (1 - p))

Independent losses in [0, 1] with mean mu and average q (Hoeffding 1963, theorem 1):

    P( kl(q || mu) >= c and q <= mu ) <= exp(-n c)

so mu <= sup {p : kl(q || p) <= ln(1 / delta) / n} with probability 1 - delta.  The same holds for
draws without replacement (Hoeffding 1963, section 6).  Where a predictor is chosen after the losses
are seen, PAC-Bayes adds a divergence and ln(2 sqrt n) (Maurer, "A Note on the PAC Bayesian
Theorem", 2004).
"""

import math
from collections.abc import Callable

from flowdup.certificate.checks import check_delta, check_losses, check_positive
from flowdup.errors import CertificateError


def binary_kl(q: float, p: float) -> float:
    """kl(q || p) in nats; infinite where p is 0 or 1 and q is not."""
    check_losses([q, p])
    return max(_part(q, p) + _part(1 - q, 1 - p), 0.0)


def _part(q: float, p: float) -> float:
    if q == 0:
        return 0.0
    return q * math.log(q / p) if p > 0 else math.inf


def kl_inverse(q: float, bound: float) -> float:
    """The largest p >= q with kl(q || p) <= bound; the last digit is rounded up."""
    _check_bound(bound)
    return largest(lambda p: binary_kl(q, p) <= bound, q, 1.0)


def transductive_kl(q: float, p: float, fraction: float) -> float:
    """kl(q || p) + (1 - beta) / beta kl((p - beta q) / (1 - beta) || p), beta the sampled fraction.

    How far the mean q of a sample without replacement lies from the mean p of all; infinite where
    no rest could have the mean that p asks for (Begin et al., AISTATS 2014).
    """
    rest = (p - fraction * q) / (1 - fraction)
    if not -1e-12 <= rest <= 1 + 1e-12:
        return math.inf
    rest = min(max(rest, 0.0), 1.0)
    return binary_kl(q, p) + (1 - fraction) / fraction * binary_kl(rest, p)


def transductive_kl_inverse(q: float, bound: float, fraction: float) -> float:
    """The largest mean p of all with `transductive_kl` of at most the bound, rounded up."""
    _check_bound(bound)
    if not 0 < fraction < 1:
        raise CertificateError(
            f"a fraction of {fraction} is labeled: the transductive bound needs some clients with "
            "labels and some without"
        )
    most = fraction * q + 1 - fraction  # all others are wrong
    return largest(lambda p: transductive_kl(q, p, fraction) <= bound, q, most)


def chernoff_bound(losses: list[float], delta: float) -> float:
    """An upper bound on the mean of independent losses in [0, 1], by kl inversion."""
    check_delta(delta)
    found = check_losses(losses)
    return kl_inverse(math.fsum(found) / found.size, math.log(1 / delta) / found.size)


def monte_carlo_bound(draws: list[float], delta: float) -> float:
    """An upper bound on the risk of a stochastic predictor, from independently sampled ones.

    Each draw is the loss in [0, 1] of predictors sampled anew, on data that may be a random part of
    all, so that its mean is the risk.
    """
    return chernoff_bound(draws, delta)


def maurer_level(divergence: float, losses: int, delta: float) -> float:
    """(KL + ln(2 sqrt n / delta)) / n, what kl(empirical || true) may be for every posterior."""
    check_delta(delta)
    check_positive(losses=losses)
    return (divergence + math.log(2 * math.sqrt(losses) / delta)) / losses


def largest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The end of an interval that begins at `low`, by bisection to the last digit, rounded up."""
    if holds(high):
        return high
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return high
        low, high = (middle, high) if holds(middle) else (low, middle)


def _check_bound(bound: float) -> None:
    if not bound >= 0:
        raise CertificateError(f"a divergence cannot be at most {bound}: give 0 or more")
