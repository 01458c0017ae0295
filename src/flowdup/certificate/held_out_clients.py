"""A bound on the mean error of a new client, from labeled clients that nothing else has seen.

Assumes: the n clients and the new one are drawn independently from one population; none of the n
has trained, tuned or chosen anything.  With e_i the share of wrong predictions at client i,

    E[e_new] <= sup {p : kl(mean e || p) <= ln(1 / delta) / n}          with probability 1 - delta.

The client is the unit: its points may depend on each other, and e_i counts once however many they
are.  It bounds a mean over clients, not the error of one of them: for that see `client_quantile`.
"""

from collections.abc import Sequence

from flowdup.certificate.kl import chernoff_bound


def mean_error_bound(errors: Sequence[float], delta: float) -> float:
    """The bound above, of errors in [0, 1], one for each client."""
    return chernoff_bound(list(errors), delta)
