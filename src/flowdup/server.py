"""The server's side of a round, the paper's algorithm 1: cohort, mean of the updates, step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.data.clients import ClientData, LazyClients
from flowdup.engines import Engine
from flowdup.errors import ConfigError, TrainingError
from flowdup.methods import Method, Params
from flowdup.optimizers import Optimizer, OptimizerConfig, State
from flowdup.random import Stream, distinct
from flowdup.settings import check_range

Labeled = NDArray[np.bool_] | tuple[range, range]  # per client, or those with labels and without


@dataclass(frozen=True)
class ServerConfig:
    rounds: int = 500
    cohort: int = 100
    alpha: float = 0.9  # the labeled share of a cohort, where unlabeled clients can learn at all
    replacement: bool = True  # whether one client may stand in a cohort twice
    decay: float = 0.0  # the last share of the rounds, over which the learning rate falls to 0
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig("adam", 1e-3))

    def __post_init__(self) -> None:
        check_range("server.rounds", self.rounds, 1)
        check_range("server.cohort", self.cohort, 1)
        check_range("server.alpha", self.alpha, 0, 1)
        check_range("server.decay", self.decay, 0, 1)
        Optimizer(self.optimizer)  # refuses what it cannot do, before anything runs

    def rate(self, round: int) -> float:
        """What the learning rate is multiplied by: 1, then falling linearly."""
        left = (self.rounds - round + 1) / (self.rounds * self.decay) if self.decay else 1.0
        return min(1.0, left)


@dataclass(frozen=True)
class ServerState:
    """All that a run must remember between rounds; every random choice follows from the round."""

    round: int
    psi: Params
    optimizer: State
    memory: Params = field(default_factory=dict)  # the method's


@dataclass(frozen=True)
class Round:
    state: ServerState
    loss: Tensor
    told: Params  # what clients were told besides psi
    padding: float  # the share of the engine's rows that held no data


def initial_state(
    config: ServerConfig, method: Method, stream: Stream, device: torch.device, dtype: torch.dtype
) -> ServerState:
    psi = {n: p.to(device, dtype) for n, p in method.init(stream.child("psi")).items()}
    memory = {n: m.to(device, dtype) for n, m in method.memory().items()}
    return ServerState(0, psi, Optimizer(config.optimizer).init(psi), memory)


def sample_cohort(
    config: ServerConfig, labeled: Labeled, learns_unlabeled: bool, stream: Stream
) -> list[int]:
    """Client indices: round(alpha * cohort) labeled ones, then unlabeled ones.

    Labeled clients fill the whole cohort where the method cannot learn from others, or where there
    are no others.  From ranges one draws in time and memory of the cohort alone: without
    replacement by Floyd's algorithm, not by a permutation of all.
    """
    having, lacking = (
        labeled
        if isinstance(labeled, tuple)
        else (np.flatnonzero(labeled), np.flatnonzero(~labeled))
    )
    if not len(having):
        raise TrainingError(
            "no training client has a label: give labels to some, or raise data.labeled_fraction"
        )
    mixed = learns_unlabeled and len(lacking) > 0
    share = round(config.alpha * config.cohort) if mixed else config.cohort
    cohort: list[int] = []
    for name, group, count in (
        ("labeled", having, share),
        ("unlabeled", lacking, config.cohort - share),
    ):
        draw, size = stream.child(name), len(group)
        if not config.replacement and count > size:
            raise ConfigError(
                f"a cohort needs {count} {name} clients and there are {size}: lower "
                "server.cohort or set server.replacement to true"
            )
        if config.replacement:
            chosen = draw.integers(count, max(size, 1)).tolist()
        elif isinstance(group, range):
            chosen = distinct(iter(draw.words(count).tolist()), count, size)
        else:
            chosen = draw.permutation(size)[:count].tolist()
        cohort += [int(group[i]) for i in chosen]
    return cohort


def check_clients(config: ServerConfig, method: Method, clients: Sequence[ClientData]) -> None:
    """Refuse clients of which no cohort can be drawn."""
    sample_cohort(config, _labeled(clients), method.learns_unlabeled, Stream(0))


def train(
    config: ServerConfig,
    method: Method,
    engine: Engine,
    clients: Sequence[ClientData],
    state: ServerState,
    stream: Stream,
) -> Iterator[Round]:
    """Yield every round from `state.round + 1` to `config.rounds`."""
    labeled = _labeled(clients)
    optimizer = Optimizer(config.optimizer)
    for number in range(state.round + 1, config.rounds + 1):
        chosen = sample_cohort(
            config, labeled, method.learns_unlabeled, stream.child("cohort", number)
        )
        cohort = dict(enumerate(chosen))
        told = {n: state.memory[n] for n in method.told}
        update = engine.train(state.psi, clients, cohort, stream.child("order", number), told)
        gradient = dict(
            zip(update.delta, torch._foreach_neg([*update.delta.values()]), strict=True)
        )
        psi, slots = optimizer.step_together(
            state.psi, gradient, state.optimizer, config.rate(number)
        )
        state = ServerState(number, psi, slots, method.adapt(state.memory, update.loss))
        yield Round(state, update.loss, told, update.padding)


def _labeled(clients: Sequence[ClientData]) -> Labeled:
    if isinstance(clients, LazyClients):
        return clients.labeled, clients.unlabeled
    return np.array([client.labeled for client in clients])
