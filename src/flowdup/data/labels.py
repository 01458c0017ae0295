"""Which training clients keep their labels: a share of all, or of those with certain traits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flowdup.data.clients import ClientData, LazyClients
from flowdup.data.traits import Trait
from flowdup.errors import ConfigError
from flowdup.random import Stream
from flowdup.settings import as_table, check_range, read_scalar

Allowed = tuple[Trait, ...] | float


@dataclass(frozen=True)
class LabeledTraits:
    """What clients must be like to keep labels; in a table, a trait's values or a share of them:

    rotation = [0, 90]   the client's rotation is 0 or 90
    classes = 0.5        its classes are among one half, drawn from the seed, of those that occur

    A client must fit all of them; an empty table fits everyone.
    """

    allowed: tuple[tuple[str, Allowed], ...] = ()

    @classmethod
    def from_table(cls, table: Any, prefix: str = "data.labeled_traits.") -> "LabeledTraits":
        """Read `data.labeled_traits` as it stands in TOML; ConfigError if it cannot be meant."""
        return cls(
            tuple(
                (read_scalar(trait, prefix), _read_allowed(value, f"{prefix}{trait}"))
                for trait, value in as_table(table, prefix).items()
            )
        )

    @staticmethod
    def paths(prefix: str) -> Iterator[str]:
        """The one key under which it can be set: names of traits are free."""
        yield prefix.rstrip(".")

    def table(self) -> dict[str, Any]:
        """As it stands in TOML."""
        return {n: list(v) if isinstance(v, tuple) else v for n, v in self.allowed}

    def fitting(self, clients: Sequence[ClientData], stream: Stream) -> list[int]:
        """The places of the clients that fit; ConfigError if there are none."""
        fit = list(range(len(clients)))
        for trait, allowed in self.allowed:
            found = {c.traits[trait] for c in clients if trait in c.traits}
            values = sorted(found, key=lambda value: (isinstance(value, str), value))
            wanted = (
                allowed if isinstance(allowed, tuple) else _draw(values, allowed, trait, stream)
            )
            fit = [i for i in fit if clients[i].traits.get(trait) in wanted]
            if not fit:
                there = ", ".join(map(str, values[:10])) or "no such trait"
                raise ConfigError(
                    f"data.labeled_traits leaves no training client with labels by '{trait}': "
                    f"clients have {there}{', ...' if len(values) > 10 else ''}; name some of "
                    "these or a larger share"
                )
        return fit


def hide_labels(
    clients: Sequence[ClientData], fraction: float, traits: LabeledTraits, stream: Stream
) -> Sequence[ClientData]:
    """Keep the labels of a random share of the clients with these traits; lazy clients are made so,
    the first of them having labels.
    """
    if isinstance(clients, LazyClients):
        if traits.allowed:
            raise ConfigError(
                "data.labeled_traits needs to know all clients, and lazy ones are not made yet: "
                "set data.lazy = false"
            )
        return clients
    if fraction == 1 and not traits.allowed:
        return clients
    fit = traits.fitting(clients, stream)
    order = stream.permutation(len(fit))
    keep = {fit[i] for i in order[: round(fraction * len(fit))]}
    if traits.allowed and not any(clients[i].labeled for i in keep):
        raise ConfigError(
            f"of {len(fit)} training clients that fit data.labeled_traits none keeps labels: raise "
            "data.labeled_fraction, or let more clients fit"
        )
    return [c if i in keep else c.unlabeled() for i, c in enumerate(clients)]


def _draw(values: list[Trait], share: float, trait: str, stream: Stream) -> tuple[Trait, ...]:
    order = stream.child(trait).permutation(len(values))
    return tuple(values[i] for i in order[: round(share * len(values))])


def _read_allowed(value: Any, path: str) -> Allowed:
    if isinstance(value, list):
        return tuple(read_scalar(item, path) for item in value)
    if type(value) not in (int, float):
        raise ConfigError(f"setting '{path}' must be a list of values, or a share of them")
    check_range(path, value, 0, 1)
    return float(value)
