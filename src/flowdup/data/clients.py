"""A client's points and labels, in memory or made when they are asked for."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from flowdup.data.tensors import as_tensor, type_name
from flowdup.data.traits import Trait
from flowdup.errors import shorten

_NO_TRAITS: dict[str, Trait] = {}  # never written to


@dataclass(frozen=True, init=False)
class ClientData:
    """One client's points x [n, *shape], perhaps with labels y [n] (-1: this point has none).

    NumPy arrays and (nested) lists of numbers become tensors; an array shares its memory with them.
    """

    x: Tensor
    y: Tensor | None = None
    name: str = ""
    traits: dict[str, Trait] = field(default_factory=dict)  # what is known of it: rotation, site
    images: tuple[int, ...] = ()  # simulated: which ones of the source's images x are

    def __init__(
        self,
        x: Tensor | ArrayLike,
        y: Tensor | ArrayLike | None = None,
        name: str = "",
        traits: dict[str, Trait] = _NO_TRAITS,
        images: tuple[int, ...] = (),
    ) -> None:
        who = f"client '{shorten(name)}'" if name else "the client"
        values = {
            "x": x if isinstance(x, Tensor) else as_tensor(x, f"{who}'s inputs"),
            "y": y if isinstance(y, Tensor | None) else as_tensor(y, f"{who}'s labels"),
            "name": name,
            "traits": {} if traits is _NO_TRAITS else traits,
            "images": images,
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def labeled(self) -> bool:
        """Whether any point has a label."""
        return self.y is not None and bool((self.y >= 0).any())

    @property
    def labels(self) -> Tensor:
        """[n], -1 where there is none."""
        return torch.full((len(self),), -1) if self.y is None else self.y

    def unlabeled(self) -> "ClientData":
        """The same client without labels."""
        return replace(self, y=None)

    def digest(self) -> str:
        """SHA-256 of the points and labels: types, shapes and bytes."""
        found = hashlib.sha256()
        for tensor in (self.x, self.y):
            if tensor is not None:
                found.update(f"{type_name(tensor)} {list(tensor.shape)} ".encode())
                content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                found.update(content.numpy().data)
        return found.hexdigest()

    def is_among(self, digests: Collection[str]) -> bool:
        """Whether these data, with their labels or without, have one of the digests."""
        return self.digest() in digests or self.unlabeled().digest() in digests


@dataclass(frozen=True, eq=False)
class LazyClients(Sequence[ClientData]):
    """Clients that are made when they are asked for and never kept: a million take no memory.

    `make` must give the same client whenever it is asked for the same number, in any thread.  The
    first `with_labels` clients have labels; those that the others are made with are taken off.
    """

    clients: int  # how many
    make: Callable[[int], ClientData]
    with_labels: int
    points: int  # of each client, or of a middling one
    recipe: dict[str, Any] = field(default_factory=dict)  # for people to read

    @property
    def labeled(self) -> range:
        """The numbers of the clients with labels."""
        return range(self.with_labels)

    @property
    def unlabeled(self) -> range:
        """The numbers of the clients without labels."""
        return range(self.with_labels, self.clients)

    def __len__(self) -> int:
        return self.clients

    @overload
    def __getitem__(self, index: int) -> ClientData: ...
    @overload
    def __getitem__(self, index: slice) -> list[ClientData]: ...
    def __getitem__(self, index: int | slice) -> ClientData | list[ClientData]:
        place = range(self.clients)[index]
        return [self[i] for i in place] if isinstance(place, range) else self._client(place)

    def _client(self, number: int) -> ClientData:
        client = self.make(number)
        return client if number < self.with_labels else client.unlabeled()
