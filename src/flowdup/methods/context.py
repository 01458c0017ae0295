"""What a method is built with: the networks and subspaces of one federation, by its seed."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from flowdup.data.input_spec import InputSpec
from flowdup.errors import ConfigError
from flowdup.hypernetwork import Hypernetwork, HypernetworkConfig
from flowdup.memory import check_memory
from flowdup.models import Network, Weights, build_network
from flowdup.models.network import Factory
from flowdup.random import Stream
from flowdup.subspace import Subspace, SubspaceConfig


@dataclass(frozen=True)
class MethodContext:
    """What a method is built from besides its settings: model, inputs, random numbers, device."""

    model: str
    spec: InputSpec
    stream: Stream
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    compute: torch.dtype | None = None  # of networks and expansions; None: dtype
    most_weights: int = 0  # that a network may have; 0: as many as memory allows
    start: Weights | None = None  # a model's weights to begin from; None: drawn by the seed
    init_scale: float = 1.0  # of what is drawn

    def __post_init__(self) -> None:
        shapes = {n: tuple(w.shape) for n, w in (self.start or {}).items()}
        if shapes and shapes != self.f.shapes:
            raise ConfigError(
                f"the weights to begin from do not fit the model '{self.model}' as it is defined "
                "here: begin from weights of this model"
            )

    @cached_property
    def f(self) -> Network:
        return self.network(self.model, self.spec.classes)

    def start_here(self) -> Weights:
        """The weights to begin from, where the method runs; empty if there are none."""
        return {n: w.to(self.device, self.dtype) for n, w in self._ordered_start().items()}

    def init_model(self, stream: Stream) -> Weights:
        """The weights that f begins with."""
        return self._ordered_start() or self.f.init(stream)

    def _ordered_start(self) -> Weights:
        """In the model's order, whatever that of a file is: sums over parameters depend on it."""
        return {n: self.start[n] for n in self.f.shapes} if self.start else {}

    def network(self, name: str, outputs: int) -> Network:
        """A network over the clients' inputs; an empty name means the model's."""
        read = self.spec.reader().to(self.device, self.dtype)
        network = build_network(
            name or self.model, self.spec.shape, outputs, read, self.most_weights
        )
        return self._placed(network)

    def own_network(self, factory: Factory, outputs: int) -> Network:
        """A network over the clients' inputs that is a method's own and has no name."""
        with torch.device("meta"):  # counted before anything is allocated
            size = sum(p.numel() for p in factory(self.spec.shape, outputs).parameters())
        remedy = "lower the settings of the method that make it so wide"
        self.check_size(size, "a network of the method", remedy)
        read = self.spec.reader().to(self.device, self.dtype)
        return self._placed(Network.build(factory, self.spec.shape, outputs, read))

    def _placed(self, network: Network) -> Network:
        network.module.to(self.device, self.compute or self.dtype)  # its buffers
        return replace(network, compute=self.compute, init_scale=self.init_scale)

    def check_size(self, weights: int, what: str, remedy: str) -> None:
        """Refuse more weights than memory holds or the context allows, before any is made."""
        check_memory(4 * weights, what, remedy)
        if 0 < self.most_weights < weights:
            raise ConfigError(
                f"{what} would take {weights:,} weights, more than {self.most_weights:,}: {remedy}"
            )

    def hypernetwork(self, config: HypernetworkConfig, k: int) -> Hypernetwork:
        """h with h1 over the clients' inputs and k outputs."""
        size = config.head_size(k)
        remedy = "lower method.hypernetwork.hidden, .embedding or .layers, or the subspace's k"
        self.check_size(size, "the hypernetwork", remedy)
        h1 = self.network(config.backbone, config.embedding)
        return Hypernetwork(config, h1, k, self.start)

    def subspace(self, config: SubspaceConfig) -> Subspace:
        """The subspace of f's weights with theta_0 where f begins."""
        return Subspace(
            config, self.f, self.stream, self.device, self.dtype, self.compute, self.start
        )
