"""A method on small clients of random images, which the laws of a method are tried on."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flowdup.batches import batch_plan, local_batches
from flowdup.data.clients import ClientData
from flowdup.data.input_spec import InputSpec
from flowdup.methods import Batch, Method, MethodConfig, MethodContext, Params
from flowdup.methods.corrected import PREFIX
from flowdup.models import Weights
from flowdup.params import prefixed
from flowdup.random import Stream

SPEC = InputSpec((1, 8, 8), "uint8", 4, (0.3,), (0.4,))
_CPU, _EXACT = torch.device("cpu"), torch.float64


@dataclass(frozen=True)
class Case:
    """A method on small clients of random images, in float64."""

    method: MethodConfig
    model: str = "cnn-small"
    seed: int = 0
    begun: bool = False  # from a model's weights, as after a stage before

    @cached_property
    def start(self) -> Weights:
        """The weights that it begins from."""
        draw = Stream(self.seed).child("before")
        return MethodContext(self.model, SPEC, draw).f.init(draw) if self.begun else {}

    @cached_property
    def built(self) -> Method:
        """The method, in float64 on a CPU."""
        context = MethodContext(
            self.model, SPEC, Stream(self.seed), _CPU, _EXACT, start=self.start or None
        )
        return self.method.build(context)

    @property
    def batch_size(self) -> int:
        """That the method wants, or 10."""
        return self.built.batch_size or 10

    @property
    def broadcast(self) -> Params:
        """What the server sends besides psi, before the first round."""
        state = self.built.server_state()
        return {n: state[n].to(_EXACT) for n in self.built.broadcast}

    @cached_property
    def psi(self) -> Params:
        """Away from the start, where much is zero."""
        draw = Stream(self.seed).child("away")
        start = self.built.init(Stream(self.seed).child("psi"))
        return {n: p.to(_EXACT) + 0.05 * noise(draw.child(n), p) for n, p in start.items()}

    @cached_property
    def correction(self) -> Params:
        """Such as validation clients give; empty if the method has none."""
        found = {"move": 0.7, "scale": 1.3, "sparsity": 0.02, "strength": 0.8, "typical": 0.4}
        numbers = {n: torch.tensor(v, dtype=_EXACT) for n, v in found.items()}
        numbers["bias"] = 0.2 * torch.arange(SPEC.classes, dtype=_EXACT)
        numbers["profile"] = 0.5 ** torch.arange(1, SPEC.classes + 1, dtype=_EXACT)
        return numbers if self.built.is_corrected else {}

    def client(self, number: int, points: int, labeled: bool = True) -> ClientData:
        """A client with random images, the same for the same number."""
        draw = Stream(self.seed).child("client", number)
        x = draw.child("x").integers(points * 64, 256).astype(np.uint8).reshape(points, *SPEC.shape)
        y = torch.from_numpy(draw.child("y").integers(points, SPEC.classes))
        return ClientData(torch.from_numpy(x), y if labeled else None, f"client-{number}")

    def clients(self) -> list[ClientData]:
        """Full, short and single-point batches; every third client has no label."""
        size = self.batch_size
        sizes = (2 * size, size + 3, 1, size - 1, 3 * size + 3, 2)
        return [self.client(i, n, labeled=i % 3 != 1) for i, n in enumerate(sizes)]

    def batch(self, points: int, labeled: bool = True) -> Batch:
        """One batch with so many rows of data."""
        plan = batch_plan(Stream(self.seed), 0, points, 1, self.batch_size)
        batches = local_batches(self.client(9, points, labeled), plan, _CPU, _EXACT)
        return Batch(*(t[0] for t in batches))

    def loss(self, batch: Batch, psi: Params | None = None) -> Tensor:
        """The objective on one batch, at psi or other parameters."""
        return self.built.loss(psi or self.psi, batch, self.psi | self.broadcast)

    def personalize(self, x: Tensor, present: Tensor | None = None) -> Params:
        """The weights of a client's own model from x."""
        there = torch.ones(len(x), dtype=_EXACT) if present is None else present
        with torch.no_grad():
            return self.built.personalize(self.deployed, x, there)

    @property
    def deployed(self) -> Params:
        """What makes personal models."""
        return self.psi | prefixed(PREFIX, self.correction)


def noise(draw: Stream, like: Tensor) -> Tensor:
    """Uniform random numbers with the shape of a tensor, in float64."""
    return torch.from_numpy(draw.uniform(like.numel())).to(_EXACT).reshape(like.shape)
