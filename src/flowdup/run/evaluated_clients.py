"""Which clients are evaluated: a group of a run's own, or others that its models can read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowdup.config import Config
from flowdup.data import ClientData, InputSpec, LazyClients, Population, load_population
from flowdup.data.given_clients import GROUPS, fit_clients, read_given_clients, with_columns
from flowdup.errors import ConfigError, DataError
from flowdup.random import Stream
from flowdup.run.folder import RunFolder
from flowdup.run.origin import stored_listing

_MOST_LAZY = 10_000  # clients that are made for an evaluation


@dataclass(frozen=True)
class ChosenClients:
    """Which clients to evaluate; by default a run's own test clients.

    `group` is train, validation or test; `source` a folder, table or file of clients; `settings`
    are texts `data.KEY=VALUE` on top of the run's.
    """

    group: str = ""
    source: Path | None = None
    settings: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.group and self.group not in GROUPS:
            raise ConfigError(f"there is no group '{self.group}': choose train, validation or test")
        if any(not text.startswith("data.") for text in self.settings):
            raise ConfigError(
                "only data settings can change here: the federation is trained already"
            )

    @property
    def are_own(self) -> bool:
        """Whether they are among the clients that a run was trained for."""
        return self.source is None and not self.settings

    @property
    def are_default(self) -> bool:
        """Whether these are whom `evaluate` scores if nothing else is said."""
        return self.are_own and self.group in ("", "test")

    def described(self) -> dict[str, Any]:
        """For a result, which says whom it is about."""
        group = self.group or ("test" if self.source is None else None)
        source = None if self.source is None else str(self.source)
        return {"group": group, "input": source, "settings": list(self.settings)}

    def among(self, population: Population) -> Sequence[ClientData]:
        """Those of a population that are in the group."""
        group = self.group or "test"
        clients: Sequence[ClientData] = getattr(population, group)
        if not clients:
            raise DataError(f"there are no {group} clients: choose another group")
        if isinstance(clients, LazyClients):
            if len(clients) > _MOST_LAZY:
                raise DataError(
                    f"{len(clients):,} clients that are made on demand are too many here: "
                    f"choose another group, or fewer with data.{group}_clients"
                )
            clients = clients[:]
        return clients

    def load(self, config: Config, spec: InputSpec) -> list[ClientData]:
        """Others than a run's own, in the form and with the classes of its models; `config` has the
        settings already.
        """
        if self.source is not None:
            clients = read_given_clients(self.source, config.data, spec, self.group)
            where, column = str(self.source), config.data.label_column
            remedy = f"or name their column, now '{column}', by --set data.label_column=NAME"
        else:
            data = with_columns(config.data, spec)
            population = load_population(data, Stream(config.seed).child("data"))
            where = f"data.source = '{config.data.source}'"
            names = population.spec.class_names
            clients = fit_clients(self.among(population), names, spec, where)
            remedy = "or choose another group"
        if not any(client.labeled for client in clients):
            raise DataError(f"{where} has no labels to compare with: store some, {remedy}")
        return clients


def count_trained_on(clients: Sequence[ClientData], folder: RunFolder) -> int | None:
    """How many of them a run was trained on: those with the same points, and the same labels or
    none.  None if nobody can say: the list of its clients is not as it was, or they were made on
    demand.
    """
    rows = stored_listing(folder).get("train", {}) if folder.started else {}
    if isinstance(rows, Mapping):
        return None
    digests = {row["sha256"] for row in rows}
    return sum(client.is_among(digests) for client in clients)
