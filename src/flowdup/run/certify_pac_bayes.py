"""The paper's bound of a trained run, and versions of it that may be less than 1.

Shares of delta: 0.8 for the theorem, 0.1 for each Monte Carlo estimate.  Variances and the radius
come from grids that are fixed here, and the theorem's share is divided by how many choices they
have.  Beware: the risk is of the sampled predictor, not of the deterministic one that is deployed;
and with `data.normalize` the mean and deviation of training inputs are taken for known beforehand.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from flowdup.certificate import pac_bayes
from flowdup.certificate.kl import kl_inverse, monte_carlo_bound
from flowdup.certificate.pac_bayes import Clients
from flowdup.params import Params
from flowdup.run.certify_compression import compressed_rows
from flowdup.run.certify_routes import Row
from flowdup.run.stochastic import Noise, StochasticPredictor, squared_distance
from flowdup.run.trained import OWN_POINTS, RANDOM_LABELS, Trained

ALPHA_H = tuple(10.0**-power for power in range(1, 9))
ALPHA_THETA = tuple(10.0**-power for power in range(-3, 7))
ALPHA_R = tuple(10.0**-power for power in range(0, 13))
RADII = tuple(4.0**power for power in range(-6, 10))  # squared
CHOICES = math.prod(map(len, (ALPHA_H, ALPHA_THETA, ALPHA_R, RADII)))
_PILOT = 6  # samples for each choice


def training_rows(run: Trained) -> Iterator[Row]:
    """Bounds by the training clients themselves."""
    run.check_random_labels()
    pac_bayes.begin_t(len(run.labeled), len(run.train))
    initial = {n: p.to(run.psi[n]) for n, p in _drawn_psi(run).items()}
    norm, clients = squared_distance(run.psi, initial, "h"), run.counts()
    predictor = StochasticPredictor(
        run.simulation.method, run.psi, run.simulation.stream.child("certify", "training")
    )
    psi_r = squared_distance(run.psi, initial, "psi_r")
    noise, alpha_r = _choose(run, predictor, norm, psi_r, clients)
    samples = predictor.samples(run.labeled, noise, run.draws)
    risk = monte_carlo_bound([s.error for s in samples], run.delta / 10)
    most = _farthest(predictor, noise.radius_squared)
    shares = [d / most for d in predictor.distances(run.train, noise, run.draws)]
    distance = most * monte_carlo_bound(shares, run.delta / 10)
    share = 0.8 * run.delta
    c = _complexity(distance, psi_r, clients, noise.alpha_theta, alpha_r, run.k)
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
        assumes = f"{RANDOM_LABELS}; {about}"
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
    yield row("own-points", rest, f"{OWN_POINTS}, by the sampled predictor")
    yield from compressed_rows(run, initial, clients)


def _drawn_psi(run: Trained) -> Params:
    """psi as the seed gives it, whatever training began from."""
    return run.simulation.method.init(run.simulation.stream.child("psi"))


def _choose(
    run: Trained, predictor: StochasticPredictor, norm: float, psi_r: float, clients: Clients
) -> tuple[Noise, float]:
    """The choice of the grids whose bound looks least, by a few samples of each pair of variances.

    They have the largest radius.  What distances a smaller one leaves follows from theirs; the risk
    is taken for 1 where it clips any of them.
    """
    share, found = 0.8 * run.delta / CHOICES, []
    level = math.log(10 / run.delta) / run.draws  # of both Monte Carlo estimates
    centre = float(predictor.psi_r.square().sum())
    for alpha_h, alpha_theta in product(ALPHA_H, ALPHA_THETA):
        trial = predictor.samples(run.labeled, Noise(alpha_h, alpha_theta, RADII[-1]), _PILOT)
        error = kl_inverse(sum(s.error for s in trial) / _PILOT, level)
        largest = max(s.norm_squared for s in trial)
        for radius in RADII:
            most = _farthest(predictor, radius)
            near = sum(s.clipped_distance_squared(radius, centre) for s in trial) / _PILOT
            distance = most * kl_inverse(min(near / most, 1.0), level)
            c, alpha_r = min(
                (_complexity(distance, psi_r, clients, alpha_theta, alpha_r, run.k), alpha_r)
                for alpha_r in ALPHA_R
            )
            risk = error if largest <= radius * (1 + 1e-5) else 1.0
            bound = pac_bayes.theorem_1(risk, norm, alpha_h, [c], clients, share).bound
            found.append((bound, Noise(alpha_h, alpha_theta, radius), alpha_r))
    _, noise, alpha_r = min(found)
    return noise, alpha_r


def _farthest(predictor: StochasticPredictor, radius_squared: float) -> float:
    """The largest squared distance from psi_r, (R + ||psi_r||)^2, and a little for rounding."""
    return (math.sqrt(radius_squared) + float(predictor.psi_r.norm())) ** 2 * (1 + 1e-6)


def _complexity(
    distance: float, psi_r: float, clients: Clients, alpha_theta: float, alpha_r: float, k: int
) -> float:
    """Of all clients, from their mean squared distance."""
    per_client = (distance + k * alpha_r) / (2 * alpha_theta)
    return clients.all * per_client + pac_bayes.gaussian_divergence(psi_r, alpha_r)
