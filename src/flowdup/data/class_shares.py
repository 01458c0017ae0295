"""How many points of each class a client has: Dirichlet label shares, drawn exactly."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate


def draw_class_counts(
    words: Iterable[int], own: Sequence[int], left: Sequence[int], concentration: float
) -> list[int]:
    """Points per class of a client, one word (32 bits) for each point.

    Label shares q ~ Dirichlet(concentration, ..., concentration) over the client's own classes, and
    the class of every point drawn from q (Hsu, Qi, Brown, "Measuring the Effects of Non-Identical
    Data Distribution for Federated Visual Classification", 2019; they write the concentration of a
    class as alpha / classes).  Of a class there are `left` points; once it has none, q is divided
    among the others, and where all of a client's own classes are used up, among all that are left.

    q itself is never made: by Polya's urn the next point is of class c with probability
    proportional to concentration + points of class c so far, which is the same law, for what is
    left of q too.  Sums and products alone are rounded the same way on every machine, and nothing
    underflows, as powers and logarithms would for a small concentration.
    """
    counts = [0] * len(left)
    for word in words:
        free = [c for c in own if counts[c] < left[c]]
        free = free or [c for c in range(len(left)) if counts[c] < left[c]]
        sums = list(accumulate(concentration + counts[c] for c in free))
        counts[free[bisect_right(sums, word / 2**32 * sums[-1])]] += 1
    return counts
