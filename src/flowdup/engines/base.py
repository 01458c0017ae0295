"""What an engine is: where the clients of a round do their work."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flowdup.data.clients import ClientData, LazyClients
from flowdup.messages import Reply, Task
from flowdup.params import Params

Ids = NDArray[np.int64] | range


class Roster(NamedTuple):
    """The ids of the clients that an engine can reach, all that a server knows of them."""

    labeled_ids: Ids
    unlabeled_ids: Ids
    away: int = 0  # clients that cannot be reached now and may come back

    @classmethod
    def of(cls, clients: Sequence[ClientData]) -> "Roster":
        """Who has labels and who has none, without making clients that are made on demand."""
        if isinstance(clients, LazyClients):
            return cls(clients.labeled, clients.unlabeled)
        labeled = np.array([client.labeled for client in clients], bool)
        return cls(np.flatnonzero(labeled), np.flatnonzero(~labeled))


class SupportQuery(NamedTuple):
    """Personalize a model on the unlabeled support set; then apply it to the query set."""

    support: Tensor  # [n, *shape]
    query: Tensor  # [m, *shape]


class Engine(Protocol):
    """Runs ClientUpdate for clients of its own: in memory, made on demand, or elsewhere."""

    @property
    def roster(self) -> Roster:
        """Who can be reached now."""
        ...

    def train(self, task: Task) -> Iterator[Reply]:
        """Every member's reply to a task, or sums of several members' replies.

        Beware: an engine may write the next round's numbers over a reply's tensors.
        """
        ...

    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
        """Logits of every client's own model, [m, classes] each, on the CPU in psi's dtype."""
        ...
