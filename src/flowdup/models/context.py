"""A model that reads a constant besides its input: more channels, equal for all points."""

import torch
from torch import Tensor, nn

from flowdup.models.network import Factory


class WithContext(nn.Module):
    """`network` on inputs [n, c, ...] with `context` [channels, ...] joined to their channels."""

    def __init__(
        self, factory: Factory, shape: tuple[int, ...], outputs: int, channels: int
    ) -> None:
        super().__init__()
        self.context = nn.Parameter(torch.zeros(channels, *shape[1:]))
        self.network = factory((shape[0] + channels, *shape[1:]), outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [n, *shape] beside the context, which is the same for all of them."""
        context = self.context.expand(x.shape[0], *self.context.shape)
        out: Tensor = self.network(torch.cat([x, context], 1))
        return out
