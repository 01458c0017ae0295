"""PAC-Bayes bounds whose prior was learned: from a part of the labeled clients, or beside them all.

A run that began from another's psi (`prior`), or from the model that another learned for everyone
(`start`: theta_0 and the trunk of h1), which had the labels of fewer clients, pays for its way from
there alone.  Who has labels is drawn once, in an order of which each run takes a beginning
(`data/labels.py`), so that the labeled clients whom the prior did not know, the rest, are drawn at
random from all whom it did not know:

    prior      N(psi_0, alpha I),  psi_0 where training began
    posterior  N(psi_0 + s (psi - psi_0), alpha I),  KL = s^2 ||psi - psi_0||^2 / (2 alpha)

and `pac_bayes.transductive_bound` holds with the rest as its labeled clients.  It holds for all s
at once; alpha comes from a grid, and delta is divided by its size.  0.9 of delta is the theorem's
and 0.1 the Monte Carlo estimate's.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowdup.certificate import pac_bayes
from flowdup.certificate.checks import harmonic_mean
from flowdup.certificate.kl import monte_carlo_bound
from flowdup.certificate.pac_bayes import Clients
from flowdup.data import ClientData, load_population
from flowdup.errors import CertificateError
from flowdup.evaluation import transductive_logits
from flowdup.params import Params
from flowdup.random import Stream
from flowdup.run.certify_routes import Answers, Row
from flowdup.run.folder import RunFolder
from flowdup.run.origin import check_clients, listing_of, stored_config
from flowdup.run.stochastic import Noise, StochasticPredictor, squared_distance
from flowdup.run.trained import OWN_POINTS, RANDOM_LABELS, SEEN_LABELS, Trained

ALPHA = tuple(10.0**-power for power in range(2, 10))
STEPS = (0.0, 0.001, 0.01, 0.1, 1.0)  # s
HELD_OUT_ALPHA = 1e-6  # where prior and posterior are one
_PILOT = 20  # samples for each choice


@dataclass(frozen=True)
class LearnedPrior:
    """psi that a run began from, and whom it can be judged by."""

    psi: Params
    rest: list[ClientData]  # with labels, which the prior did not have
    clients: Clients  # n_L, n and m, of all whose labels the prior did not have
    known: int  # clients whose labels it had


def learned_prior_rows(run: Trained) -> Iterator[Row]:
    """Bounds by the labeled clients whom the prior did not know; none where there is no prior."""
    if not run.config.prior and not run.config.start:
        return
    run.check_random_labels()
    prior = _find_prior(run)
    yield _moved_row(run, prior, "h", "pac-bayes-prior")
    yield _moved_row(run, prior, "h2", "pac-bayes-prior-h2")
    yield _serfling_row(run, prior)


def same_prior_row(run: Trained, aside: Sequence[ClientData], measured: float | None) -> Row:
    """Prior and posterior are N(psi, alpha I) over h2, learned from all training clients, and the
    divergence is 0: a bound by clients that were set aside, dressed as PAC-Bayes.
    """
    stream = run.simulation.stream.child("certify", "prior")
    predictor = StochasticPredictor(run.simulation.method, run.psi, stream, "h2")
    samples = predictor.samples(aside, Noise(HELD_OUT_ALPHA, 0.0, math.inf), run.draws)
    errors = [s.error for s in samples]
    risk = monte_carlo_bound(errors, run.delta / 10)
    found = pac_bayes.inductive_bound(risk, 0.0, len(aside), 0.9 * run.delta)
    return Row(
        "pac-bayes-held-out",
        f"{len(aside)} clients set aside",
        found.bound,
        run.delta,
        "clients set aside and new ones are drawn independently from one population; prior and "
        "posterior are one, so that it is a bound by held-out clients in disguise; about new "
        "clients, by a predictor whose h2 is sampled",
        float(np.mean(errors)),
        measured,
        found.terms
        | {"divergence": 0.0, "alpha_h": HELD_OUT_ALPHA, "draws": run.draws, "clients": len(aside)},
    )


def _find_prior(run: Trained) -> LearnedPrior:
    """Refused where the order of labels does not make the rest a random sample."""
    folder = RunFolder(Path(run.config.prior or run.config.start))
    if not folder.started:
        raise CertificateError(SEEN_LABELS)
    config = stored_config(folder)
    same = replace(config.data, labeled_fraction=run.config.data.labeled_fraction)
    earlier = config.prior or config.start
    if config.seed != run.config.seed or same != run.config.data or earlier:
        raise CertificateError(
            f"{folder.path}, where this run began, has other clients, or began elsewhere itself: "
            "train both from the same data and seed, that one with a smaller "
            "data.labeled_fraction and from nothing"
        )
    population = load_population(config.data, Stream(config.seed).child("data"))
    check_clients(folder, listing_of(population))
    known = {i for i, client in enumerate(population.train) if client.labeled}
    unknown = [client for i, client in enumerate(run.train) if i not in known]
    rest = [client for client in unknown if client.labeled]
    clients = Clients(len(rest), len(unknown), harmonic_mean([*map(len, unknown)]))
    pac_bayes.begin_t(clients.labeled, clients.all)
    return LearnedPrior(run.simulation.initial_state().psi, rest, clients, len(known))


def _moved_row(run: Trained, prior: LearnedPrior, random: str, name: str) -> Row:
    """The best of all s and alpha, by a few samples of each; what is not random is the prior's."""
    stream = run.simulation.stream.child("certify", name)
    share = 0.9 * run.delta / len(ALPHA)
    distance = squared_distance(run.psi, prior.psi, random)
    predictors = {s: _between(run, prior, random, s, stream.child(str(s))) for s in STEPS}

    def bound(risk: float, s: float, alpha: float) -> pac_bayes.Bound:
        divergence = pac_bayes.gaussian_divergence(s**2 * distance, alpha)
        return pac_bayes.transductive_bound(risk, divergence, prior.clients, share)

    tried = []
    for s, predictor in predictors.items():
        for alpha in ALPHA:
            if s > 0 and bound(0.0, s, alpha).terms["unlabeled"] >= 1:
                continue  # whatever it starts from, the way there costs too much
            trial = predictor.samples(prior.rest, Noise(alpha, 0.0, math.inf), _PILOT)
            risk = float(np.mean([sample.error for sample in trial]))
            tried.append((bound(risk, s, alpha).terms["unlabeled"], s, alpha))
    least = {s: min(found for found, step, _ in tried if step == s) for _, s, _ in tried}
    _, s, alpha = min(tried)
    samples = predictors[s].samples(prior.rest, Noise(alpha, 0.0, math.inf), run.draws)
    errors = [sample.error for sample in samples]
    found = bound(monte_carlo_bound(errors, run.delta / 10), s, alpha)
    what = "psi_h" if random == "h" else "h2, with the prior's h1"
    terms: dict[str, Any] = {
        "divergence": pac_bayes.gaussian_divergence(s**2 * distance, alpha),
        "step": s,
        "alpha_h": alpha,
        "choices": len(ALPHA),
        "draws": run.draws,
        "squared_distance": distance,
        "looked_like": {str(step): value for step, value in least.items()},
    }
    risk, about = float(np.mean(errors)), f"by a sampled {what}"
    return _row(run, prior, name, found, risk, run.measured, about, terms)


def _between(
    run: Trained, prior: LearnedPrior, random: str, s: float, stream: Stream
) -> StochasticPredictor:
    """Around psi_0 + s (psi - psi_0) in what is random, and psi_0 in all else."""
    psi = prior.psi | {
        n: p + s * (run.psi[n] - p) for n, p in prior.psi.items() if n.startswith(random)
    }
    return StochasticPredictor(run.simulation.method, psi, stream, random)


def _serfling_row(run: Trained, prior: LearnedPrior) -> Row:
    """The prior's own psi, which is not random: nothing is paid but for the sampling of clients."""
    with run.simulation.cores():
        logits = transductive_logits(run.simulation.engine, prior.psi, prior.rest)
    risk = float(np.mean(Answers(logits, prior.rest).errors))
    margin = pac_bayes.serfling_margin(prior.clients.labeled, prior.clients.all, run.delta)
    found = pac_bayes.serfling_bound(risk, prior.clients, run.delta)
    about = "by the prior's psi as it is"
    terms = {"divergence": 0.0, "margin": margin}
    measured = run.error_unlabeled(prior.psi)
    return _row(run, prior, "pac-bayes-prior-serfling", found, risk, measured, about, terms)


def _row(
    run: Trained,
    prior: LearnedPrior,
    name: str,
    found: pac_bayes.Bound,
    risk: float,
    measured: float | None,
    about: str,
    terms: dict[str, Any],
) -> Row:
    counts = {"n_L": prior.clients.labeled, "n": prior.clients.all, "known": prior.known}
    return Row(
        name,
        f"{len(prior.rest)} labeled training clients that the prior did not know",
        found.terms["unlabeled"],
        run.delta,
        f"{RANDOM_LABELS}; {OWN_POINTS}, {about}",
        risk,
        measured,
        found.terms | terms | counts,
    )
