"""The clients of a federation, in groups."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowdup.data.clients import ClientData, LazyClients
from flowdup.data.input_spec import InputSpec


@dataclass(frozen=True)
class Population:
    """The clients of a federation; the groups share no client and no point."""

    spec: InputSpec
    train: Sequence[ClientData]
    validation: Sequence[ClientData]
    test: Sequence[ClientData]
    certify: Sequence[ClientData] = ()  # for `flowdup certify` alone

    def checked(self) -> "Population":
        """The same with every client in the right types; DataError if one does not fit.

        Lazy clients are checked when they are made.
        """
        groups = (self.train, self.validation, self.test, self.certify)
        return Population(self.spec, *map(self._checked, groups))

    def _checked(self, clients: Sequence[ClientData]) -> Sequence[ClientData]:
        if isinstance(clients, LazyClients):
            make = clients.make
            return replace(clients, make=lambda number: self.spec.check(make(number)))
        return [self.spec.check(client) for client in clients]

    def listing(self) -> dict[str, Any]:
        """Who is in which group, whose labels are learned from, a digest of each one's data, and of
        which of the source's images a simulated client is made: training images, and for test
        clients test images.

        Of lazy clients, how many there are, how they are made, and the first of them.
        """

        def row(client: ClientData) -> dict[str, Any]:
            images = {"images": list(client.images)} if client.images else {}
            return {
                "name": client.name,
                "points": len(client),
                "traits": client.traits,
                "sha256": client.digest(),
            } | images

        train: Any
        if isinstance(self.train, LazyClients):
            train = {
                "clients": len(self.train),
                "labeled": len(self.train.labeled),
                "points": self.train.points,
                "recipe": self.train.recipe,
                "first": row(self.train[0]),
            }
        else:
            train = [row(client) | {"labeled": client.labeled} for client in self.train]
        groups = {"validation": self.validation, "test": self.test}
        if self.certify:  # runs from before go on
            groups["certify"] = self.certify
        return {"train": train} | {n: [row(c) for c in clients] for n, clients in groups.items()}
