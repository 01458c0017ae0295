"""The paper's bound of a trained run, and versions of it that may be less than 1.

Shares of delta: 0.8 for the theorem, 0.1 for each Monte Carlo estimate.  Variances and the radius
come from grids that are fixed here, and the theorem's share is divided by how many choices they
have.  Beware: the risk is of the sampled predictor, not of the deterministic one that is deployed;
and with `data.normalize` the mean and deviation of training inputs are taken for known beforehand.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from flowdup.certificate import pac_bayes
from flowdup.certificate.checks import harmonic_mean
from flowdup.certificate.compression import compress
from flowdup.certificate.kl import monte_carlo_bound
from flowdup.certificate.pac_bayes import Clients
from flowdup.config import Config
from flowdup.data import ClientData
from flowdup.errors import CertificateError
from flowdup.evaluation import transductive_logits
from flowdup.params import Params, pack, unpack
from flowdup.run.certify_routes import Answers, Row
from flowdup.run.simulation import Simulation
from flowdup.run.stochastic import Noise, StochasticPredictor, as_flowdup, squared_distance

ALPHA_H = tuple(10.0**-power for power in range(1, 9))
ALPHA_THETA = tuple(10.0**-power for power in range(0, 7))
ALPHA_R = tuple(10.0**-power for power in range(0, 13))
RADII = tuple(4.0**power for power in range(-6, 10))  # squared
CHOICES = math.prod(map(len, (ALPHA_H, ALPHA_THETA, ALPHA_R, RADII)))
LEVELS = (2, 4, 16)  # values of a quantised psi_h
PRIOR_ALPHA = 1e-6  # the variance around psi where the prior is learned
_PILOT = 6  # samples for each choice
_OWN_POINTS = "about the own points of training clients without labels"
_RANDOM_LABELS = "who has labels was drawn at random from all training clients; losses in [0, 1]"


@dataclass(frozen=True)
class Trained:
    """A trained run, with what is known of its training clients."""

    simulation: Simulation
    config: Config
    psi: Params
    delta: float
    draws: int
    measured: float | None  # error of training clients without labels

    @property
    def train(self) -> list[ClientData]:
        """All of them, labeled or not."""
        return list(self.simulation.population.train)

    @property
    def labeled(self) -> list[ClientData]:
        """Those that have labels."""
        return [client for client in self.train if client.labeled]

    def counts(self) -> Clients:
        """n_L, n and m."""
        return Clients(len(self.labeled), len(self.train), harmonic_mean([*map(len, self.train)]))


def training_rows(run: Trained) -> Iterator[Row]:
    """Bounds by the training clients themselves."""
    _check(run)
    initial = run.simulation.initial_state().psi
    norm, clients = squared_distance(run.psi, initial, "h"), run.counts()
    predictor = StochasticPredictor(
        run.simulation.method, run.psi, run.simulation.stream.child("certify", "training")
    )
    psi_r = squared_distance(run.psi, initial, "psi_r")
    noise, alpha_r = _choose(run, predictor, norm, psi_r, clients)
    samples = predictor.samples(run.labeled, noise, run.draws)
    risk = monte_carlo_bound([s.error for s in samples], run.delta / 10)
    most = (math.sqrt(noise.radius_squared) + float(predictor.psi_r.norm())) ** 2 * (1 + 1e-6)
    shares = [d / most for d in predictor.distances(run.train, noise, run.draws)]
    distance = most * monte_carlo_bound(shares, run.delta / 10)
    share = 0.8 * run.delta
    c = _complexity(distance, psi_r, clients, noise.alpha_theta, alpha_r, as_k(run))
    divergence = pac_bayes.gaussian_divergence(norm, noise.alpha_h)
    settings = {
        **noise._asdict(),
        "alpha_r": alpha_r,
        "choices": CHOICES,
        "draws": run.draws,
        "n_L": clients.labeled,
        "n": clients.all,
        "m": clients.points,
        "hypernetwork_squared": norm,
        "psi_r_squared": psi_r,
        "distance_squared": distance,
        "divergence": divergence,
        "complexity": c,
    }
    empirical = float(np.mean([s.error for s in samples]))

    def row(name: str, found: pac_bayes.Bound, about: str) -> Row:
        terms: dict[str, Any] = found.terms | settings
        assumes = f"{_RANDOM_LABELS}; {about}"
        data = f"{clients.labeled} of {clients.all} training clients"
        return Row(
            f"pac-bayes-{name}",
            data,
            found.bound,
            run.delta,
            assumes,
            empirical,
            run.measured,
            terms,
        )

    new_points = "about new points of all training clients, by the sampled predictor"
    plain = pac_bayes.theorem_1(risk, norm, noise.alpha_h, [c], clients, share, CHOICES)
    yield row("plain", plain, new_points)
    if clients.points == round(clients.points):
        inverted = pac_bayes.kl_bound(risk, divergence, c, clients, share / CHOICES)
        yield row("kl", inverted, f"{new_points}; clients have equally many points")
    own = pac_bayes.transductive_bound(risk, divergence, clients, share / CHOICES)
    rest = pac_bayes.Bound(own.terms["unlabeled"], own.terms)
    yield row("own-points", rest, f"{_OWN_POINTS}, by the sampled predictor")
    yield _compressed_row(run, initial, clients)


def prior_row(run: Trained, aside: Sequence[ClientData], measured: float | None) -> Row:
    """Prior and posterior N(psi, alpha I) over h2, learned from all training clients; the bound is
    by clients that were set aside, and the divergence is 0.
    """
    stream = run.simulation.stream.child("certify", "prior")
    predictor = StochasticPredictor(run.simulation.method, run.psi, stream, "h2")
    samples = predictor.samples(aside, Noise(PRIOR_ALPHA, 0.0, math.inf), run.draws)
    errors = [s.error for s in samples]
    risk = monte_carlo_bound(errors, run.delta / 10)
    found = pac_bayes.inductive_bound(risk, 0.0, len(aside), 0.9 * run.delta)
    return Row(
        "pac-bayes-data-prior",
        f"{len(aside)} clients set aside",
        found.bound,
        run.delta,
        "clients set aside and new ones are drawn independently from one population; about new "
        "clients, by a predictor whose h2 is sampled",
        float(np.mean(errors)),
        measured,
        found.terms | {"alpha_h": PRIOR_ALPHA, "draws": run.draws, "clients": len(aside)},
    )


def _compressed_row(run: Trained, initial: Params, clients: Clients) -> Row:
    """psi_h - psi_h0 with few different values: the divergence is the length of its code."""
    names = [n for n in run.psi if n.startswith("h")]
    moved = {n: run.psi[n].cpu() - initial[n].cpu() for n in names}
    rows = []
    for levels in LEVELS:
        code = compress(pack(moved).double().numpy(), levels)
        change = unpack(torch.from_numpy(code.values).float(), moved)
        psi = run.psi | {n: initial[n] + change[n].to(initial[n]) for n in names}
        logits = transductive_logits(run.simulation.engine, psi, run.labeled)
        risk = float(np.mean(Answers(logits, run.labeled).errors))
        found = pac_bayes.transductive_bound(risk, code.nats, clients, run.delta / len(LEVELS))
        row = Row(
            "pac-bayes-compression",
            f"{clients.labeled} of {clients.all} training clients",
            found.terms["unlabeled"],
            run.delta,
            f"{_RANDOM_LABELS}; {_OWN_POINTS}, by a quantised psi_h",
            risk,
            run.measured,
            found.terms | {"levels": levels, "code_nats": code.nats, "numbers": len(code.values)},
        )
        rows.append((found.bound, risk, levels, row))  # where all say nothing, the least risk
    return min(rows)[-1]


def _choose(
    run: Trained, predictor: StochasticPredictor, norm: float, psi_r: float, clients: Clients
) -> tuple[Noise, float]:
    """The choice of the grids whose bound looks least, by a few samples of each."""
    share, found = 0.8 * run.delta / CHOICES, []
    for alpha_h, alpha_theta in product(ALPHA_H, ALPHA_THETA):
        trial = predictor.samples(run.labeled, Noise(alpha_h, alpha_theta, RADII[-1]), _PILOT)
        risk = sum(s.error for s in trial) / _PILOT
        far = 2 * max(s.norm_squared for s in trial)
        radius = next((r for r in RADII if r >= far), RADII[-1])
        distance = sum(s.distance_squared for s in trial) / _PILOT
        for alpha_r in ALPHA_R:
            c = _complexity(distance, psi_r, clients, alpha_theta, alpha_r, as_k(run))
            bound = pac_bayes.theorem_1(risk, norm, alpha_h, [c], clients, share).bound
            found.append((bound, Noise(alpha_h, alpha_theta, radius), alpha_r))
    _, noise, alpha_r = min(found)
    return noise, alpha_r


def _complexity(
    distance: float, psi_r: float, clients: Clients, alpha_theta: float, alpha_r: float, k: int
) -> float:
    """Of all clients, from their mean squared distance."""
    per_client = (distance + k * alpha_r) / (2 * alpha_theta)
    return clients.all * per_client + pac_bayes.gaussian_divergence(psi_r, alpha_r)


def as_k(run: Trained) -> int:
    """The dimension of the subspace."""
    return as_flowdup(run.simulation.method).subspace.k


def _check(run: Trained) -> None:
    as_flowdup(run.simulation.method)
    data = run.config.data
    if run.simulation.stage or run.config.start:
        raise CertificateError(
            "the hypernetwork began from weights that labeled clients had trained, so that no "
            "prior is free of their labels: train without `start` and stages, or use the route "
            "held-out-clients"
        )
    if data.labeled_traits.allowed or data.lazy:
        raise CertificateError(
            "who has labels was not drawn at random from all training clients: train without "
            "data.labeled_traits and data.lazy, or use the route held-out-clients"
        )
    if any(bool((client.labels < 0).any()) for client in run.labeled):
        raise CertificateError(
            "some labeled clients have points without a label, whose loss nobody knows: leave "
            "these points out, or use the route held-out-clients"
        )
    pac_bayes.begin_t(len(run.labeled), len(run.train))
