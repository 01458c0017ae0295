"""ODPFL-HN: each client its own model, all d weights emitted by a hypernetwork with an encoder.

Amosy, Eyal, Chechik, "Late to the Party? On-Demand Unlabeled Personalized Federated Learning", WACV
2024.  No official code is public; e and h2 are as in a re-implementation in the code of FedTTA.

    r     = mean over x in X of h1(x)             32 numbers, as they are
    theta = theta_0 + h2(r)                       h2: four hidden layers, d outputs
    L     = mean over labeled (x, y) of l(y, f(x; theta))

Messages and departures are those of PeFLL without labels (`pefll.py`), with e = 32.  The two differ
in the embedding: here it is narrow and not normalised.  h1 has f's architecture unless set.
"""

from dataclasses import dataclass, field

from flowdup.hypernetwork import HypernetworkConfig
from flowdup.methods.pefll import PeFLL, PeFLLConfig


@dataclass(frozen=True)
class ODPFLHNConfig(PeFLLConfig):
    """Settings of `odpfl-hn`: PeFLL's with other defaults."""

    hypernetwork: HypernetworkConfig = field(
        default_factory=lambda: HypernetworkConfig(
            embedding=32, hidden=100, layers=4, normalize=False
        )
    )


class ODPFLHN(PeFLL):
    """All of it is PeFLL's, from other settings."""
