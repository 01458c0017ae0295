"""Vectors packed into one: nothing is lost, and nothing is mistaken for them."""

import pytest
import torch
from torch import Tensor
from torch.func import grad

from flowdup.accelerate.packed import PackedVectors
from flowdup.methods import Batch, Objective, Params

NOTHING = Batch(*[torch.zeros(0)] * 4)
SHAPES: list[dict[str, tuple[int, ...]]] = [
    {},
    {"matrix": (2, 3), "number": ()},
    {"vector": (3,)},
    {"a": (2,), "matrix": (2, 3), "b": (4,), "number": (), "vectors": (3, 2)},
]


class Distance(Objective):
    """From what the server sent, and from what it broadcast besides."""

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        apart = [(p - start[n]).square().sum() * i for i, (n, p) in enumerate(params.items(), 1)]
        return torch.stack([start["broadcast"], *apart]).sum()


@pytest.mark.parametrize("shapes", SHAPES)
def test_packed_and_unpacked_again_it_is_the_same(shapes: dict[str, tuple[int, ...]]) -> None:
    psi = {n: torch.randn(shape) for n, shape in shapes.items()}
    packed = PackedVectors(Distance(), psi)
    one = packed.pack(psi)
    assert sum(p.ndim == 1 for p in one.values()) == any(p.ndim == 1 for p in psi.values())
    again = packed.unpack(one)
    assert again.keys() == psi.keys()
    assert all(torch.equal(again[n], psi[n]) for n in psi)


def test_the_objective_and_its_gradient_are_the_same() -> None:
    psi, start = ({n: torch.randn(s) for n, s in SHAPES[-1].items()} for _ in range(2))
    broadcast = {"broadcast": torch.tensor(2.0)}
    method = Distance()
    packed = PackedVectors(method, psi)
    ordered = packed.unpack(packed.pack(psi))  # which is how the objective counts them
    wanted = grad(method.loss)(ordered, NOTHING, start | broadcast)
    found = grad(packed.loss)(packed.pack(psi), NOTHING, packed.pack(start) | broadcast)
    assert all(torch.equal(g, wanted[n]) for n, g in packed.unpack(found).items())
