"""How a federation runs, apart from what it learns, and what cannot be done together."""

from dataclasses import dataclass

from flowdup.config import Config
from flowdup.federation.secure_round import check_secure


@dataclass(frozen=True)
class FederationSettings:
    """How a federation runs, apart from what it learns."""

    minimum: int = 1  # nodes whose replies a round needs
    norm_bound: float = 1000.0  # the largest norm of a client's update that is not refused
    encoding: str = "factors"  # of replies (`wire.py`)
    secure: bool = False  # whether the coordinator sees sums over nodes alone (`secure_round.py`)
    number_bound: float = 8.0  # in a secure sum, the largest magnitude of a number of an update
    most_clients: int = 10_000  # that a node may say it has; its share of cohorts follows from it


def check_federation(config: Config, settings: FederationSettings) -> None:
    """Refuse what cannot be done together, before anything runs."""
    if settings.secure:
        check_secure(config, settings.encoding, settings.number_bound)
