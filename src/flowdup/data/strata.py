"""Which classes and which rotation each simulated client has: drawn, or equally often."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from flowdup.random import Stream

Indices = NDArray[np.int64]


def choose_classes(clients: int, per_client: int, classes: int, stream: Stream) -> Indices:
    """Distinct classes for every client, each class used equally often.  # [clients, per_client]

    A client takes the classes used least so far, ties broken at random.
    """
    used = np.zeros(classes, np.int64)
    rows = []
    for noise in stream.substreams(0, clients, classes):
        row = np.lexsort((noise, used))[:per_client]
        used[row] += 1
        rows.append(row)
    return np.array(rows, np.int64).reshape(clients, per_client)


def stratify(
    clients: int, per_client: int, classes: int, rotations: int, stream: Stream
) -> tuple[Indices, Indices]:
    """Class sets [clients, per_client] and rotations [clients], all in random order.

    Every set of classes, every class, every rotation, and every set with every rotation occurs
    equally often, up to one.  per_client = 0 is one empty set.
    """
    every = list(combinations(range(classes), per_client))
    times = np.full(len(every), clients // len(every))
    rest = stream.child("sets").permutation(len(every))[: clients % len(every)]
    times[_balance_classes([every[i] for i in rest], every, classes)] += 1
    order = stream.child("order").permutation(len(every))
    rows = np.repeat(order, times[order])  # clients of one set side by side, so that their
    turns = stream.child("rotations").permutation(rotations)[np.arange(clients) % rotations]
    place = stream.child("clients").permutation(clients)  # rotations differ; then shuffled
    sets = np.array(every, np.int64).reshape(len(every), per_client)
    return sets[rows[place]], turns[place]


def _balance_classes(
    sets: list[tuple[int, ...]], every: list[tuple[int, ...]], classes: int
) -> list[int]:
    """Places in `every` of as many different sets, in which each class is used equally often up to
    one.

    Where class a is used more than class b by two, one of the sets with a and without b has, with b
    in place of a, a partner that is not among the sets: there are fewer with b and without a.
    Every exchange lowers the sum of squares of uses, so this ends.
    """
    chosen = set(sets)
    while True:
        used = np.bincount([c for one in chosen for c in one], minlength=classes)
        most, least = int(used.argmax()), int(used.argmin())
        if used[most] - used[least] <= 1:
            return [every.index(one) for one in sorted(chosen)]
        for one in sorted(chosen):
            other = tuple(sorted({*one} - {most} | {least}))
            if most in one and least not in one and other not in chosen:
                chosen = chosen - {one} | {other}
                break
