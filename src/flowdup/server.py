"""The server's side of a round, the paper's algorithm 1: cohort, mean of the updates, step."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flowdup.aggregation import Aggregation, AggregationConfig, Guard, mean, robust
from flowdup.engines import Engine, Roster
from flowdup.errors import ConfigError, TrainingError
from flowdup.messages import Cohort, Task, schema_of
from flowdup.methods import Deployed, Method, Params
from flowdup.methods.corrected import PREFIX
from flowdup.models import Weights
from flowdup.optimizers import Optimizer, OptimizerConfig, State
from flowdup.params import prefixed
from flowdup.privacy import (
    Draw,
    PrivacyConfig,
    PrivateRounds,
    after_round,
    gaussian_noise,
    secret_stream,
)
from flowdup.random import Stream, distinct
from flowdup.settings import check_range


@dataclass(frozen=True)
class ServerConfig:
    """Settings of `server`: rounds, cohorts, and the optimiser of psi."""

    rounds: int = 500  # how many a stage has
    cohort: int = 100  # clients in a round
    alpha: float = 0.9  # the labeled share of a cohort, where unlabeled clients can learn at all
    replacement: bool = True  # whether one client may stand in a cohort twice
    lr_decay_fraction: float = 0.0  # the last part of the rounds, in which the rate falls to 0
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig("adam", 1e-3))
    averaging: float = 0.0  # what stays of psi's moving average in a round; 0: there is none
    warm_up: int = 0  # the first rounds, in which the rate rises from 0
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)

    def __post_init__(self) -> None:
        check_range("server.rounds", self.rounds, 1)
        check_range("server.cohort", self.cohort, 1)
        check_range("server.alpha", self.alpha, 0, 1)
        check_range("server.warm_up", self.warm_up, 0)
        check_range("server.lr_decay_fraction", self.lr_decay_fraction, 0, 1)
        check_range("server.averaging", self.averaging, 0, 0.9999)
        Optimizer(self.optimizer)  # refuses what it cannot do, before anything runs
        if self.privacy.noise:
            self._check_privacy()

    def _check_privacy(self) -> None:
        """Refuse what no epsilon could be told for."""
        for wrong, remedy in (
            (not self.aggregation.norm_bound, "set server.aggregation.norm_bound"),
            (self.aggregation.name != "mean", "set server.aggregation.name to 'mean'"),
            (self.replacement, "set server.replacement to false"),
        ):
            if wrong:
                raise ConfigError(
                    "server.privacy.noise needs a mean of updates with a norm bound, of cohorts "
                    f"drawn without replacement: {remedy}"
                )

    @property
    def sees_each(self) -> bool:
        """Whether the aggregation needs every client's own reply."""
        return self.aggregation.sees_each

    def rate(self, round: int) -> float:
        """What the learning rate is multiplied by: rising linearly, 1, then falling linearly."""
        risen = min(1.0, round / (self.warm_up + 1))
        if not self.lr_decay_fraction:
            return risen
        return min(risen, (self.rounds - round + 1) / (self.rounds * self.lr_decay_fraction))


@dataclass(frozen=True)
class BestRound:
    """Of a stage so far, by accuracy on validation clients; among equals that with the least loss
    on them, or the earlier.
    """

    round: int
    accuracy: float
    misses: int = 0  # evaluations since one with a higher accuracy
    loss: float = math.inf  # infinite where nobody told it

    def after(self, round: int, accuracy: float, loss: float = math.inf) -> "BestRound":
        """That after one more evaluation."""
        if accuracy > self.accuracy:
            return BestRound(round, accuracy, 0, loss)
        misses = self.misses + 1
        if accuracy == self.accuracy and loss < self.loss:
            return BestRound(round, accuracy, misses, loss)
        return replace(self, misses=misses)


@dataclass(frozen=True)
class ServerState:
    """All that a run must remember between rounds; every random choice follows from the round."""

    round: int  # of all stages
    psi: Params
    optimizer: State
    method_state: Params = field(default_factory=dict)  # what the method keeps besides psi
    average: Params = field(default_factory=dict)  # of psi over rounds, if the server keeps one
    correction: Params = field(default_factory=dict)  # what `methods/corrected.py` was fitted to
    stage: int = 0
    began: int = 0  # rounds of the stages before
    best: BestRound | None = None  # None before the first evaluation
    start: Weights = field(default_factory=dict)  # that the stage began from; empty: by the seed
    released: tuple[PrivateRounds, ...] = ()  # of all rounds, the draws that epsilon follows from

    @property
    def deployed(self) -> Params:
        """What makes personal models: psi or its average, and the correction."""
        return (self.average or self.psi) | prefixed(PREFIX, self.correction)


@dataclass(frozen=True)
class Round:
    """What a round gave."""

    state: ServerState
    loss: Tensor
    broadcast: Params  # what clients were sent besides psi
    padding: float  # the share of the engine's rows that held no data
    cohort: Cohort  # whom the server asked
    guard: Guard | None = None  # what was refused and clipped, where replies are looked at


def initial_state(
    config: ServerConfig, method: Method, stream: Stream, device: torch.device, dtype: torch.dtype
) -> ServerState:
    """Of a first stage."""
    psi = {n: p.to(device, dtype) for n, p in method.init(stream.child("psi")).items()}
    own = {n: s.to(device, dtype) for n, s in method.server_state().items()}
    if taken := {"round", "loss", "padding", "seconds", *psi} & {*method.broadcast}:
        raise ConfigError(
            f"the method broadcasts '{min(taken)}', which is the name of something else: rename it"
        )
    average = {n: p.clone() for n, p in psi.items()} if config.averaging else {}
    return ServerState(0, psi, Optimizer(config.optimizer).init(psi), own, average)


def cohort_draws(config: ServerConfig, roster: Roster, learns_unlabeled: bool) -> tuple[Draw, Draw]:
    """How many labeled clients a cohort has, and how many unlabeled ones, of how many.

    While some clients are away, a cohort without replacement may be smaller than it should be.
    """
    mixed = learns_unlabeled and len(roster.unlabeled_ids) > 0
    share = _labeled_share(config) if mixed else config.cohort
    draws = (
        Draw(share, len(roster.labeled_ids)),
        Draw(config.cohort - share, len(roster.unlabeled_ids)),
    )
    if config.replacement or not roster.away:
        return draws
    return (draws[0].possible(), draws[1].possible())


def _labeled_share(config: ServerConfig) -> int:
    """One at least where alpha is not 0: a small cohort must not round it away."""
    return max(round(config.alpha * config.cohort), 1 if config.alpha else 0)


def sample_cohort(
    config: ServerConfig, roster: Roster, learns_unlabeled: bool, stream: Stream
) -> list[int]:
    """Client ids: round(alpha * cohort) labeled ones, at least one, then unlabeled ones.

    Labeled clients fill the whole cohort where the method cannot learn from others, or where there
    are no others.  From ranges one draws in time and memory of the cohort alone: without
    replacement by Floyd's algorithm, not by a permutation of all.
    """
    if not len(roster.labeled_ids):
        raise TrainingError(
            "no training client has a label: give labels to some, or raise data.labeled_fraction"
        )
    labeled, unlabeled = cohort_draws(config, roster, learns_unlabeled)
    cohort: list[int] = []
    for name, ids, (count, size) in (
        ("labeled", roster.labeled_ids, labeled),
        ("unlabeled", roster.unlabeled_ids, unlabeled),
    ):
        draw = stream.child(name)
        if not config.replacement and count > size:
            raise ConfigError(
                f"a cohort needs {count} {name} clients and there are {size}: lower "
                "server.cohort or set server.replacement to true"
            )
        if config.replacement:
            chosen = draw.integers(count, max(size, 1)).tolist()
        elif isinstance(ids, range) and not config.privacy.noise:  # which counts on random order
            chosen = distinct(iter(draw.words(count).tolist()), count, size)
        else:
            chosen = draw.permutation(size)[:count].tolist()
        cohort += [int(ids[i]) for i in chosen]
    return cohort


def check_roster(config: ServerConfig, learns_unlabeled: bool, roster: Roster) -> None:
    """Refuse clients of which no cohort can be drawn."""
    sample_cohort(config, roster, learns_unlabeled, Stream(0))


def train(
    config: ServerConfig,
    method: Method,
    engine: Engine,
    state: ServerState,
    stream: Stream,
    aggregate: Aggregation | None = None,
) -> Iterator[Round]:
    """Yield every round from `state.round + 1` to the stage's last.

    Replies are aggregated as the settings say, or by `aggregate`.
    """
    while state.round < state.began + config.rounds:
        latest = next_round(config, method, engine, state, stream, aggregate)
        state = latest.state
        yield latest


def next_round(
    config: ServerConfig,
    method: Method,
    engine: Engine,
    state: ServerState,
    stream: Stream,
    aggregate: Aggregation | None = None,
) -> Round:
    """The round after `state`: a cohort trains, the server takes a step along its mean update."""
    number, schema = state.round + 1, schema_of(state.psi)
    private = config.privacy.noise > 0
    draw = secret_stream(config.privacy.secret) if private and config.privacy.secret else stream
    roster, learns = engine.roster, method.learns_unlabeled  # of those who can be reached now
    chosen = sample_cohort(config, roster, learns, draw.child("cohort", number))
    broadcast = {n: state.method_state[n] for n in method.broadcast}
    task = Task(number, state.psi, broadcast, dict(enumerate(chosen)))
    replies = engine.train(task)
    if aggregate is None and config.sees_each:  # which checks them, and goes on without some
        bound = config.aggregation.norm_bound
        noise = gaussian_noise(config.privacy, bound, stream, number) if private else None
        aggregate = robust(config.aggregation, number, len(task.cohort), noise)
    else:
        replies = (reply.check(number, schema) for reply in replies)
    update = (aggregate or mean)(state.psi, replies)
    psi, memory = Optimizer(config.optimizer).step_along(
        state.psi, update.delta, state.optimizer, config.rate(number - state.began)
    )
    psi = _scaled(state.psi, psi, method.lr_scales)
    average = _moved(state.average, psi, config.averaging, number - state.began)
    new = replace(state, round=number, psi=psi, optimizer=memory, average=average)

    deployed = Deployed(method, new.deployed)
    own = method.update_server_state(state.method_state, update.loss, deployed)
    if private:
        unknown = torch.full_like(update.loss, torch.nan)
        blind = method.update_server_state(state.method_state, unknown, deployed)
        if not all(torch.allclose(own[n], t, 0, 0, equal_nan=True) for n, t in blind.items()):
            raise ConfigError(
                "the method's server state follows the clients' loss, which server.privacy does "
                "not cover: choose another method, or settings of it that do not"
            )
        draws = cohort_draws(config, roster, learns)
        new = replace(new, released=after_round(state.released, config.privacy.noise, draws))
    new = replace(new, method_state=own)
    return Round(new, update.loss, broadcast, update.padding, task.cohort, update.guard)


def _scaled(before: Params, after: Params, scales: Iterable[tuple[str, float]]) -> Params:
    """psi after the same step, at another learning rate for parameters with these prefixes: the
    steps of both optimisers are multiples of it.
    """
    for prefix, scale in scales:
        if scale != 1:
            moved = {n: before[n].lerp(p, scale) for n, p in after.items() if n.startswith(prefix)}
            after = after | moved
    return after


def _moved(average: Params, psi: Params, share: float, round: int) -> Params:
    """The moving average after a stage's round: at first it follows psi, which still moves far."""
    stays = min(share, round / (round + 10))
    return {n: a.lerp(psi[n], 1 - stays) for n, a in average.items()}
