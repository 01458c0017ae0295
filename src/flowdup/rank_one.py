"""Rank-one updates: matrices whose gradient on one batch is an outer product, kept as factors.

The hypernetwork sees one set, so each of h2's matrices W [out, in] meets one vector a per batch,
and its gradient is the outer product of g (that of W a) and a.  Under plain SGD a client's matrix
after t steps is W + L^T R with L [t, out] and R [t, in]: W is shared by all clients, and no client
has a matrix of its own.

A loss must apply such a matrix to one vector, by `apply`, and do nothing else with it.  A method
names its matrices (`Objective.rank_one`); `applied_once` tries them before the first step, and
those that a loss applies twice or reads otherwise are trained as ordinary dense parameters.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.functional import linear

from flowdup.errors import ConfigError, FlowdupError
from flowdup.params import Params

Loss = Callable[[Params], Tensor]


class Outer(NamedTuple):
    """The outer product g a^T."""

    g: Tensor  # [out]
    a: Tensor  # [in]

    @classmethod
    def zeros(cls, matrix: Tensor) -> "Outer":
        """The zero matrix of the same shape, as factors."""
        out, into = matrix.shape
        return cls(matrix.new_zeros(out), matrix.new_zeros(into))

    def squared_norm(self) -> Tensor:
        """|| g a^T ||^2 = || g ||^2 || a ||^2."""
        return self.g.square().sum() * self.a.square().sum()

    def scaled(self, scale: Tensor | float) -> "Outer":
        """The matrix times a number."""
        return Outer(self.g * scale, self.a)


class Factors(NamedTuple):
    """A sum of outer products, left^T right."""

    left: Tensor  # [steps, out]
    right: Tensor  # [steps, in]

    @classmethod
    def zeros(cls, matrix: Tensor, steps: int) -> "Factors":
        """The zero matrix, with room for so many steps."""
        out, into = matrix.shape
        return cls(matrix.new_zeros(steps, out), matrix.new_zeros(steps, into))

    def put(self, outer: Outer, place: Tensor) -> "Factors":
        """One outer product more, in the row where `place` [steps] is 1."""
        rows = place[:, None]
        return Factors(self.left + rows * outer.g, self.right + rows * outer.a)

    def product(self) -> Tensor:
        """The matrix itself, as a dense tensor."""
        return self.left.T @ self.right  # [out, in]


class FactoredParams(NamedTuple):
    """A client's psi: tensors of its own, and of the factored matrices what it added to them."""

    dense: Params
    factors: dict[str, Factors]

    @classmethod
    def start(cls, psi: Params, factored: Sequence[str], steps: int) -> "FactoredParams":
        """psi before the first step: the named matrices as factors that are zero."""
        dense = {n: p for n, p in psi.items() if n not in factored}
        return cls(dense, {n: Factors.zeros(psi[n], steps) for n in factored})


class FactoredGradient(NamedTuple):
    """The gradient of one step: dense for most parameters, an outer product for the others."""

    dense: Params
    outer: dict[str, Outer]

    def clipped(self, limit: float) -> "FactoredGradient":
        """g min(1, limit / ||g||), the norm taken over all parameters together."""
        squares = [g.square().sum() for g in self.dense.values()]
        squares += [o.squared_norm() for o in self.outer.values()]
        scale = limit / torch.stack(squares).sum().sqrt().clamp(min=limit)
        return FactoredGradient(
            {n: g * scale for n, g in self.dense.items()},
            {n: o.scaled(scale) for n, o in self.outer.items()},
        )


def gradient_and_value(
    loss: Loss, start: Params, psi: FactoredParams
) -> tuple[FactoredGradient, Tensor]:
    """The gradient of loss(psi) by psi, and the loss; `start` has the factored matrices' bases."""

    def objective(dense: Params, probes: dict[str, Outer]) -> Tensor:
        return loss(dense | _matrices(start, psi.factors, probes))

    probes = {n: Outer.zeros(start[n]) for n in psi.factors}
    (dense, outer), value = grad_and_value(objective, (0, 1))(psi.dense, probes)
    return FactoredGradient(dense, outer), value


def applied_once(loss: Loss, psi: Params, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the named matrices whose gradient is an outer product: `loss` is tried with them."""
    for name in names:
        if name not in psi or psi[name].ndim != 2:
            raise ConfigError(f"the method's rank_one names '{name}', which is no matrix of psi")
    kept = list(names)
    while kept:
        factors = {n: Factors.zeros(psi[n], 1) for n in kept}
        probes = {n: Outer.zeros(psi[n]) for n in kept}
        try:
            with torch.no_grad():
                loss(psi | _matrices(psi, factors, probes, trial=True))
            break
        except NotRankOneError as error:
            kept.remove(error.name)
        except Exception:  # whatever else a loss does that only a tensor can do
            with torch.no_grad():
                loss(psi)  # raises if the matrices were not to blame
            kept.clear()
    if lost := [n for n in names if n not in kept]:
        warnings.warn(
            f"the loss does not apply {', '.join(lost)} to one vector and nothing else: the "
            "gradient is taken as a whole matrix, which is right but slower",
            stacklevel=2,
        )
    return tuple(kept)


class NotRankOneError(FlowdupError):
    """A factored matrix was used otherwise than by one `apply` to one vector."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the loss uses the matrix '{name}' otherwise than it did on the first batch, where "
            "it applied it to one vector: take its name out of the method's rank_one"
        )


class RankOneMatrix:
    """One client's matrix, base + left^T right, in place of a tensor among the parameters.

    It can be applied to one vector once; anything else raises NotRankOneError.  The gradients by
    the zeros in `probe` are the two factors of the gradient by the matrix.
    """

    def __init__(
        self, name: str, base: Tensor, factors: Factors, probe: Outer, trial: bool = False
    ) -> None:
        self.name, self.base, self.factors, self.probe = name, base, factors, probe
        self.trial, self.applied = trial, False

    def __matmul__(self, a: Tensor) -> Tensor:
        if self.applied or a.ndim != 1:
            raise NotRankOneError(self.name)
        self.applied = True
        try:
            changed: Tensor = _Apply.apply(  # type: ignore[no-untyped-call]
                a, self.base, *self.factors, *self.probe, self.trial
            )
        except _SeveralVectorsError:
            raise NotRankOneError(self.name) from None
        return changed

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # a protocol of Python's that it does not have
            raise AttributeError(attribute)
        raise NotRankOneError(self.name)

    def _refuse(self, *others: Any, **named: Any) -> NoReturn:
        raise NotRankOneError(self.name)

    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __neg__ = __abs__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = _refuse
    __getitem__ = __len__ = __iter__ = _refuse

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), named: Any = None
    ) -> NoReturn:
        found = [a for a in [*arguments, *(named or {}).values()] if isinstance(a, cls)]
        nested = [b for a in arguments if isinstance(a, list | tuple) for b in a]
        found += [b for b in nested if isinstance(b, cls)]
        raise NotRankOneError(found[0].name)


def apply(matrix: Tensor, a: Tensor, bias: Tensor) -> Tensor:
    """W a + b, for W a tensor or in its place a RankOneMatrix."""  # [out]
    if isinstance(matrix, RankOneMatrix):
        return matrix @ a + bias
    return linear(a, matrix, bias)


def _matrices(
    bases: Params, factors: dict[str, Factors], probes: dict[str, Outer], trial: bool = False
) -> dict[str, Any]:
    return {n: RankOneMatrix(n, bases[n], f, probes[n], trial) for n, f in factors.items()}


class _SeveralVectorsError(Exception):
    """A matrix meets several vectors of one client: under a vmap of the loss's own, or once more
    in a gradient that the loss takes itself.
    """


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        a: Tensor,
        base: Tensor,
        left: Tensor,
        right: Tensor,
        into_g: Tensor,
        into_a: Tensor,
        trial: bool,
    ) -> Tensor:
        return _product(a, base, left, right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.trial = inputs[6]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.trial:  # nobody asked for a gradient but the loss itself
            raise _SeveralVectorsError
        (g,) = gradients
        a, base, left, right = ctx.saved_tensors
        return g @ base + (left @ g) @ right, None, None, None, g, a, None

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        a: Tensor,
        base: Tensor,
        left: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, int]:
        """Over clients, each with factors of its own."""
        if dims[2] is None:
            raise _SeveralVectorsError
        product: Tensor = vmap(_product, dims[:4])(a, base, left, rest[0])
        return product, 0


def _product(a: Tensor, base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return base @ a + (right @ a) @ left
