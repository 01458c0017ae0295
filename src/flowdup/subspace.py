"""Models in a random subspace: theta = theta_0 + P v, with P [d, k] fixed and k << d.

P and theta_0 are functions of a seed (`random.py`): the same bits on every machine, never sent and
never stored.  Each kind of P has columns of norm 1.  Rows may be scaled per layer: with
`row_scale = "layer"` the rows of layer l are multiplied by s_l = sigma_l / rms(sigma), sigma_l
being the deviation of the layer's initial draw, so that a step in v moves every layer by the same
share of its own size.  The mean of s^2 over all d weights is 1, so columns keep their norm.

| kind        | entries of P before the row scale                   | bytes      | P^T P = I |
| ----------- | --------------------------------------------------- | ---------- | --------- |
| `dense`     | signs / sqrt(d)                                     | 4 d k      | roughly   |
| `kronecker` | A (x) B / sqrt(d), A and B signs, sqrt(d) x sqrt(k) | 8 sqrt(dk) | roughly   |
| `hashed`    | one sign per weight, in the coordinate it belongs to | 16 d      | exactly   |
| `identity`  | 1 (k = d)                                           | 0          | exactly   |
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from flowdup.autograd import apply_function
from flowdup.errors import ConfigError
from flowdup.models.network import Network, Weights
from flowdup.random import Stream

_DENSE_LIMIT = 2**29  # entries: 2 GiB in float32
_FAST = 8  # sides of matrices that are multiples of it


@dataclass(frozen=True)
class SubspaceConfig:
    """Settings of `method.subspace`: the kind of the expansion P, and its dimension k."""

    kind: str = "kronecker"  # of P: dense, kronecker, hashed or identity
    k: int = 10_000  # numbers in v; 0: as many as the model has weights
    row_scale: str = "layer"  # layer: rows of P follow the sizes of a layer's weights; or none


class Expansion(Protocol):
    """A linear map v [k] -> P v, before the row scale; numbers after the d-th are no weight's."""

    signs: tuple[str, ...] = ()  # its matrices of signs, exact in every dtype: multiplied in any

    def __call__(self, v: Tensor) -> Tensor: ...

    def tensors(self) -> list[Tensor]:
        """Everything that defines the map, in a fixed order."""
        ...


class Dense(Expansion):
    """P_ij = sign / sqrt(d): the reference, for small d."""

    def __init__(self, stream: Stream, scales: Tensor, k: int) -> None:
        d = scales.numel()
        if d * k > _DENSE_LIMIT:
            raise ConfigError(
                f"a dense expansion of {d} x {k} does not fit in memory: use kind 'kronecker'"
            )
        self.matrix = torch.from_numpy(stream.signs(d * k)).reshape(d, k) / math.sqrt(d)

    def __call__(self, v: Tensor) -> Tensor:
        return self.matrix @ v

    def tensors(self) -> list[Tensor]:
        """What it keeps in memory: the matrix."""
        return [self.matrix]


class Kronecker(Expansion):
    """P = (A (x) B) / sqrt(d), cut to d rows and k columns: two matrix products.

    The weights stand row by row in a grid [a, b] with a b >= d, the coordinates in a grid [m, n]
    with m n >= k, each nearly square; P v = A V B^T / sqrt(d).  A is [a, m], B is [b, n].
    Every weight is covered, whatever d and k.  b is a multiple of 8, and zeros fill up m and n to
    one: such matrices GPUs multiply fast.
    """

    signs = ("left", "right")

    def __init__(self, stream: Stream, scales: Tensor, k: int) -> None:
        self.d, self.k = scales.numel(), k
        (a, b), (self.m, self.n) = _grid(self.d, _FAST), _grid(k)
        left = torch.from_numpy(stream.child("left").signs(a * self.m)).reshape(a, self.m)
        right = torch.from_numpy(stream.child("right").signs(b * self.n)).reshape(b, self.n)
        self.left, self.right = pad(left, (0, -self.m % _FAST)), pad(right, (0, -self.n % _FAST))

    def __call__(self, v: Tensor) -> Tensor:
        grid = pad(v, (0, self.m * self.n - self.k)).reshape(self.m, self.n) / math.sqrt(self.d)
        grid = pad(grid, (0, -self.n % _FAST, 0, -self.m % _FAST)).to(self.left.dtype)
        return (self.left @ grid @ self.right.T).reshape(-1)

    def tensors(self) -> list[Tensor]:
        """What it keeps in memory: both factors."""
        return [self.left[:, : self.m].contiguous(), self.right[:, : self.n].contiguous()]


class Hashed(Expansion):
    """Each weight belongs to one coordinate, with a random sign: disjoint supports, P^T P = I.

    Weight i belongs to coordinate pi(i) mod k, pi a random permutation, so that supports differ in
    size by one at most.  The norm of a support counts its rows as they will be scaled.
    """

    def __init__(self, stream: Stream, scales: Tensor, k: int) -> None:
        d = scales.numel()
        coordinate = stream.child("coordinate").permutation(d) % k
        sign = stream.child("sign").signs(d)
        energy = np.bincount(coordinate, weights=scales.double().numpy() ** 2, minlength=k)
        self.coordinate = torch.from_numpy(coordinate.astype(np.int32))
        self.sign = torch.from_numpy(sign)
        self.norm = torch.from_numpy(np.sqrt(energy).astype(np.float32))
        weights = _by_coordinate(coordinate, k)
        self.weights = torch.from_numpy(np.maximum(weights, 0).astype(np.int32))
        self.signs_of_weights = torch.from_numpy(np.where(weights < 0, 0, sign[weights]))

    def __call__(self, v: Tensor) -> Tensor:
        place = self.coordinate, self.sign, self.weights, self.signs_of_weights
        return apply_function(_Spread, v / self.norm, *place)

    def tensors(self) -> list[Tensor]:
        """What defines it: a coordinate and a sign per weight, a norm per coordinate."""
        return [self.coordinate, self.sign, self.norm]


def _by_coordinate(coordinate: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """The weights of every coordinate, down a column of a grid [., k] row by row; -1: there are no
    more.  They ascend, so that a row's weights come from one stretch of memory, which caches hold.
    """
    sizes = np.bincount(coordinate, minlength=k)
    first = np.cumsum(sizes) - sizes
    weights = np.argsort(coordinate, kind="stable")
    row = np.arange(len(weights)) - np.repeat(first, sizes)
    grid = np.full((sizes.max(), k), -1)
    grid[row, coordinate[weights]] = weights
    return grid.reshape(-1)


class _Spread(torch.autograd.Function):
    """v [k] -> [d], the value of every weight's coordinate, times the weight's sign.

    Backward, the weights of a coordinate stand in a column of a grid, whose rows are summed: the
    same bits each time, where adding into v would be a race.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        v: Tensor, coordinate: Tensor, sign: Tensor, weights: Tensor, signs_of_weights: Tensor
    ) -> Tensor:
        return v.index_select(0, coordinate) * _like(sign, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.k = inputs[0].shape[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        v = apply_function(_Collect, gradients[0], *ctx.saved_tensors, ctx.k)
        return v, None, None, None, None


class _Collect(torch.autograd.Function):
    """[d] -> [k], signed sums over the weights of every coordinate: the transpose of `_Spread`.

    Under `vmap` the clients come last, [d, clients]: a weight's numbers lie side by side, so that
    memory is read in whole lines, although the weights of a coordinate lie apart.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(
        rows: Tensor,
        coordinate: Tensor,
        sign: Tensor,
        weights: Tensor,
        signs_of_weights: Tensor,
        k: int,
    ) -> Tensor:
        found = rows.index_select(0, weights) * _like(signs_of_weights, rows)
        return found.reshape(-1, k, *rows.shape[1:]).sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:5])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows = apply_function(_Spread, gradients[0], *ctx.saved_tensors)
        return rows, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], rows: Tensor, *others: Any
    ) -> tuple[Tensor, int]:
        """The rows alone differ from client to client."""
        assert isinstance(dims[0], int) and set(dims[1:]) == {None}
        found = apply_function(_Collect, rows.movedim(dims[0], -1).contiguous(), *others)
        return found, found.ndim - 1


def _like(signs: Tensor, rows: Tensor) -> Tensor:
    """Signs [n] as [n, 1, ...], with as many dimensions as the rows."""
    return signs.reshape(-1, *(1 for _ in rows.shape[1:]))


class Identity(Expansion):
    """P = I, k = d: for hypernetworks that emit every weight."""

    def __init__(self, stream: Stream, scales: Tensor, k: int) -> None:
        if k != scales.numel():
            raise ConfigError(f"the identity expansion needs k = d = {scales.numel()}, not {k}")

    def __call__(self, v: Tensor) -> Tensor:
        return v

    def tensors(self) -> list[Tensor]:
        """What it keeps in memory: nothing."""
        return []


KINDS: dict[str, Callable[[Stream, Tensor, int], Expansion]] = {
    "dense": Dense,
    "kronecker": Kronecker,
    "hashed": Hashed,
    "identity": Identity,
}


class Subspace:
    """theta(v) = theta_0 + S P v for one network, S the row scale."""

    def __init__(
        self,
        config: SubspaceConfig,
        network: Network,
        stream: Stream,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        compute: torch.dtype | None = None,  # of products with signs; None: dtype
        start: Weights | None = None,  # theta_0; None: drawn by the seed
    ) -> None:
        self.d = network.size
        self.k = config.k or self.d
        if config.kind not in KINDS:
            raise ConfigError(
                f"unknown subspace kind '{config.kind}': use one of {', '.join(KINDS)}"
            )
        if config.row_scale not in ("layer", "none"):
            raise ConfigError(f"row_scale is 'layer' or 'none', not '{config.row_scale}'")
        if not 1 <= self.k <= self.d:
            raise ConfigError(
                f"the subspace dimension k = {self.k} must lie between 1 and the model's "
                f"d = {self.d} weights: lower method.subspace.k or choose a larger model"
            )
        self.shapes = network.shapes
        scaled = config.row_scale == "layer" and config.kind != "identity"
        self.scale = _row_scale(network) if scaled else dict.fromkeys(network.shapes, 1.0)
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]
        scales = zip(self.sizes, self.scale.values(), strict=True)
        rows = torch.cat([torch.full((n,), s, dtype=torch.float32) for n, s in scales])  # [d]
        self.expansion = KINDS[config.kind](stream.child("expansion"), rows, self.k)
        start = start or network.init(stream.child("theta_0"))
        self.theta_0 = torch.cat([start[name].flatten() for name in self.shapes])  # [d]
        self.fingerprint = self._fingerprint(config.kind)
        self._move(device, dtype, compute or dtype)

    def __call__(self, v: Tensor, start: Weights | None = None) -> Weights:
        """theta = theta_0 + P v, as the network's weights; `start` may take theta_0's place."""
        moved = self.expansion(v)
        moves = torch.split(moved, [*self.sizes, moved.shape[0] - self.d])
        starts = torch.split(self.theta_0, self.sizes)
        if start:
            starts = tuple(start[name].flatten() for name in self.shapes)
        return {
            name: torch.add(own, move, alpha=self.scale[name]).reshape(shape)
            for (name, shape), own, move in zip(self.shapes.items(), starts, moves, strict=False)
        }

    def _fingerprint(self, kind: str) -> str:
        """SHA-256 of kind, shapes, row scale, theta_0 and the expansion, little-endian."""
        head = {"kind": kind, "k": self.k, "shapes": self.shapes}
        digest = hashlib.sha256(json.dumps(head, separators=(",", ":")).encode())
        scale = torch.tensor(list(self.scale.values()), dtype=torch.float32)
        for tensor in [scale, self.theta_0, *self.expansion.tensors()]:
            array = tensor.numpy()
            digest.update(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).data)
        return digest.hexdigest()

    def _move(self, device: torch.device | str, dtype: torch.dtype, compute: torch.dtype) -> None:
        for name, value in vars(self.expansion).items():
            if isinstance(value, Tensor):
                kind = compute if name in self.expansion.signs else dtype
                moved = value.to(device, kind if value.is_floating_point() else None)
                setattr(self.expansion, name, moved)
        self.theta_0 = self.theta_0.to(device, dtype)


def _grid(size: int, multiple: int = 1) -> tuple[int, int]:
    """A nearly square grid of at least `size` cells, its columns a multiple of this."""
    columns = -(-(math.isqrt(size - 1) + 1) // multiple) * multiple
    return -(-size // columns), columns


def _row_scale(network: Network) -> dict[str, float]:
    sizes = {name: math.prod(shape) for name, shape in network.shapes.items()}
    energy = sum(sizes[name] * network.deviations[name] ** 2 for name in sizes)
    rms = math.sqrt(energy / network.size)
    return {name: network.deviations[name] / rms for name in sizes}
