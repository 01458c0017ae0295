"""A method's one-dimensional parameters packed into one tensor: few operations per step, however
many biases and norms a network has.
"""

import torch
from torch import Tensor

from flowdup.methods import Batch, Objective, Params

_NAME = "vectors."  # which no parameter can have


class PackedVectors(Objective):
    """The same objective, of parameters like psi whose vectors are packed into one.

    `pack` puts the others first: the order of names differs from psi's, before and after.
    """

    def __init__(self, method: Objective, psi: Params) -> None:
        self.method, self.rank_one = method, method.rank_one
        self.sizes = {n: p.numel() for n, p in psi.items() if p.ndim == 1}

    def pack(self, params: Params) -> Params:
        """With all vectors of one dimension as one tensor."""
        if not self.sizes:
            return params
        others = {n: p for n, p in params.items() if n not in self.sizes}
        return others | {_NAME: torch.cat([params[n] for n in self.sizes])}

    def unpack(self, params: Params) -> Params:
        """With every vector under its own name again."""
        if not self.sizes:
            return params
        parts = torch.split(params[_NAME], [*self.sizes.values()])
        vectors = dict(zip(self.sizes, parts, strict=True))
        return {n: p for n, p in params.items() if n != _NAME} | vectors

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return self.method.loss(self.unpack(params), batch, self.unpack(start))
