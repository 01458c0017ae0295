"""A metric of your own: how often the right class is among the two largest logits.

    flowdup --import examples/own_metric.py evaluate runs/digits

It stands in `evaluation.json`, tables and reports beside accuracy, with its mean, deviation, worst
decile and worst over clients.
"""

from torch import Tensor

import flowdup


def top_two(logits: Tensor, y: Tensor) -> float:
    """Of one client, on its labeled points: logits [n, classes], y [n]."""
    return 100.0 * float((logits.topk(2).indices == y[:, None]).any(1).double().mean())


flowdup.register_metric("top_two", top_two, unit="%")
