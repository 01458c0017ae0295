"""Clients on other machines: a run knows how many there are and what inputs look like, no data."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowdup.calibration import Calibration
from flowdup.config import Config
from flowdup.data import Population
from flowdup.engines import Engine, Roster
from flowdup.federation_spec import FederationSpec
from flowdup.methods import Params
from flowdup.models import Weights
from flowdup.privacy import PrivateRounds


@dataclass(frozen=True)
class RemoteStage:
    """All that a machine with clients needs to know to train them in one stage of a run."""

    config: Config  # of the stage
    number: int
    spec: FederationSpec  # with the SHA-256 of P and theta_0
    start: Weights  # that the stage begins from; empty: by the seed
    interpolates: bool  # whether the method's personal models lie on a line from everyone's


@dataclass(frozen=True)
class RemotePopulation(Population, ABC):
    """A population without clients of its own, whose engine reaches them elsewhere."""

    @property
    @abstractmethod
    def roster(self) -> Roster:
        """Who can be reached."""

    @abstractmethod
    def connect(self, stage: RemoteStage) -> Engine:
        """The engine of a stage, whose machines are ready and have the same P and theta_0."""

    @abstractmethod
    def accuracies(self, round: int, params: Params) -> Sequence[float]:
        """Of validation clients with models of their own, in percent, computed where they are."""

    @abstractmethod
    def calibrate(self, round: int, params: Params) -> Calibration | None:
        """The correction of these parameters that is best for the validation clients, fitted by
        what may be told of them; None if none of them has labels.
        """

    @abstractmethod
    def note_release(self, round: int, psi: Params, draw: PrivateRounds) -> list[PrivateRounds]:
        """Note, before anyone is sent it, that a round with noise gave this psi; the draws of
        those that were noted for the same round before and are other ones.
        """

    @abstractmethod
    def traffic(self) -> dict[str, int]:
        """Of the latest round, for its metrics: bytes per client, up and down."""

    @abstractmethod
    def listing(self) -> dict[str, Any]:
        """What stays the same while clients come and go, for clients.json."""

    def checked(self) -> "Population":
        """Itself: clients are checked where they are."""
        return self
