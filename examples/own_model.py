"""A network of your own, for the clients' model and for the hypernetwork.

    flowdup --import examples/own_model.py train digits --out runs/own-model --set model=two-layers

Any `nn.Module` from inputs [n, *shape] to [n, outputs] will do, if it keeps no statistics of
batches (GroupNorm instead of BatchNorm).
"""

import math

from torch import nn

import flowdup


def two_layers(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The same factory makes f (outputs: classes) and h1 (outputs: width of the embedding)."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 100), nn.ReLU(), nn.Linear(100, outputs)
    )


flowdup.register_model("two-layers", two_layers)
