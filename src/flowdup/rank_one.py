"""Matrices that a client changes by one outer product per local step.

The hypernetwork sees one set, so each of h2's matrices W [out, in] meets one vector a per batch,
and its gradient is the outer product of g (that of W a) and a.  Under SGD a client's matrix after t
steps is W + L^T R with L [t, out] and R [t, in]: W is shared by all clients, and no client ever has
a matrix of its own.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class Factors(NamedTuple):
    """A sum of outer products, left^T right."""

    left: Tensor  # [steps, out]
    right: Tensor  # [steps, in]

    @classmethod
    def none(cls, matrix: Tensor, steps: int) -> "Factors":
        out, into = matrix.shape
        return cls(matrix.new_zeros(steps, out), matrix.new_zeros(steps, into))

    def put(self, outer: "Outer", place: Tensor) -> "Factors":
        """One outer product more, in the row where `place` [steps] is 1."""
        rows = place[:, None]
        return Factors(self.left + rows * outer.g, self.right + rows * outer.a)

    def product(self) -> Tensor:
        return self.left.T @ self.right  # [out, in]


class Outer(NamedTuple):
    """The outer product of two vectors, or of zeros that `apply` gives gradients to."""

    g: Tensor  # [out]
    a: Tensor  # [in]

    @classmethod
    def zeros(cls, matrix: Tensor) -> "Outer":
        out, into = matrix.shape
        return cls(matrix.new_zeros(out), matrix.new_zeros(into))

    def square(self) -> Tensor:
        """The squared norm."""
        return self.g.square().sum() * self.a.square().sum()


class RankOne(NamedTuple):
    """One client's matrix, base + left^T right; it stands for a tensor among the parameters.

    The objective must `apply` it once.  The gradients by the zeros in `probe` are then the two
    factors of the gradient by the matrix.
    """

    base: Tensor  # [out, in]
    factors: Factors
    probe: Outer


def apply(matrix: Tensor, a: Tensor, bias: Tensor) -> Tensor:
    """W a + b, for W a tensor or in its place a RankOne."""  # [out]
    if isinstance(matrix, RankOne):
        changed: Tensor = _Apply.apply(a, matrix.base, *matrix.factors, *matrix.probe)
        return changed + bias
    return linear(a, matrix, bias)


class _Apply(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor, base: Tensor, left: Tensor, right: Tensor, into_g: Tensor, into_a: Tensor
    ) -> Tensor:
        return base @ a + (right @ a) @ left

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        a, base, left, right = ctx.saved_tensors
        return g @ base + (left @ g) @ right, None, None, None, g, a
