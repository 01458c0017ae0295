"""What a method is built with: the networks and subspaces of one federation, by its seed."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from flowdup.data.clients import InputSpec
from flowdup.models import Network, build_network
from flowdup.random import Stream
from flowdup.subspace import Subspace, SubspaceConfig


@dataclass(frozen=True)
class MethodContext:
    model: str
    spec: InputSpec
    stream: Stream
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    compute: torch.dtype | None = None  # of networks and expansions; None: dtype

    @cached_property
    def f(self) -> Network:
        return self.network(self.model, self.spec.classes)

    def network(self, name: str, outputs: int) -> Network:
        """A network over the clients' inputs; an empty name means the model's."""
        read = self.spec.reader().to(self.device, self.dtype)
        network = build_network(name or self.model, self.spec.shape, outputs, read)
        network.module.to(self.device, self.compute or self.dtype)  # its buffers
        return replace(network, compute=self.compute)

    def subspace(self, config: SubspaceConfig) -> Subspace:
        return Subspace(config, self.f, self.stream, self.device, self.dtype, self.compute)
