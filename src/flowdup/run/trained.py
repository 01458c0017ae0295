"""A trained run as the paper's bound sees it: its training clients, and who of them has labels."""

from dataclasses import dataclass

import numpy as np

from flowdup.certificate.checks import harmonic_mean
from flowdup.certificate.pac_bayes import Clients
from flowdup.config import Config
from flowdup.data import ClientData
from flowdup.errors import CertificateError
from flowdup.evaluation import transductive_logits
from flowdup.params import Params
from flowdup.run.certify_routes import Answers
from flowdup.run.simulation import Simulation
from flowdup.run.stochastic import as_flowdup

OWN_POINTS = "about the own points of training clients without labels"
RANDOM_LABELS = "who has labels was drawn at random from all training clients; losses in [0, 1]"

SEEN_LABELS = (
    "the hypernetwork began from weights that labeled clients had trained, so that no prior is "
    "free of their labels: train without stages, and `start` from nothing or from a run with the "
    "same data, seed and fewer labels; or use the route held-out-clients"
)


@dataclass(frozen=True)
class Trained:
    """A trained run, with what is known of its training clients."""

    simulation: Simulation
    config: Config
    psi: Params
    delta: float
    draws: int
    measured: float | None  # error of training clients without labels, by the deployed psi
    everyone: list[ClientData] | None  # `train` with labels that training did not see, if known

    @property
    def train(self) -> list[ClientData]:
        """All of them, labeled or not."""
        return list(self.simulation.population.train)

    @property
    def labeled(self) -> list[ClientData]:
        """Those that have labels."""
        return [client for client in self.train if client.labeled]

    def error_unlabeled(self, psi: Params) -> float | None:
        """The mean error of those that have none, by any psi; None where nobody knows it."""
        pairs = zip(self.train, self.everyone or (), strict=False)
        hidden = [known for client, known in pairs if known.labeled and not client.labeled]
        if not hidden:
            return None
        with self.simulation.cores():
            logits = transductive_logits(self.simulation.engine, psi, hidden)
        return float(np.mean(Answers(logits, hidden).errors))

    def counts(self) -> Clients:
        """n_L, n and m."""
        return Clients(len(self.labeled), len(self.train), harmonic_mean([*map(len, self.train)]))

    @property
    def k(self) -> int:
        """The dimension of the subspace."""
        return as_flowdup(self.simulation.method).subspace.k

    def check_random_labels(self) -> None:
        """Refuse a run of which nobody can say that labels were drawn at random, and seen by
        nothing before.
        """
        as_flowdup(self.simulation.method)
        data = self.config.data
        if self.simulation.stage:
            raise CertificateError(SEEN_LABELS)
        if data.labeled_traits.allowed or data.lazy:
            raise CertificateError(
                "who has labels was not drawn at random from all training clients: train without "
                "data.labeled_traits and data.lazy, or use the route held-out-clients"
            )
        drawn = round(data.labeled_fraction * len(self.train))
        all_had = self.everyone is not None and all(client.labeled for client in self.everyone)
        if not all_had or len(self.labeled) != drawn:
            raise CertificateError(
                "nobody can say that who has labels was drawn at random, as it is where all "
                "training clients of a source have labels and data.labeled_fraction hides some: "
                "give clients in files, all with labels, or use the route held-out-clients"
            )
        if any(bool((client.labels < 0).any()) for client in self.labeled):
            raise CertificateError(
                "some labeled clients have points without a label, whose loss nobody knows: leave "
                "these points out, or use the route held-out-clients"
            )
