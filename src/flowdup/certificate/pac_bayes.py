"""The paper's transductive multi-task PAC-Bayes bound (theorems 1 and A.1), corrected, and tighter.

n clients, n_L of them, drawn at random, with labels; m points each; rho a distribution over
hypernetworks, pi one chosen before it is known who has labels; Q one over regularisers, P chosen
before the data; A(S_i) a client's distribution over models.  With probability 1 - delta, for all
rho and Q,

    er <= her + sqrt( (1 - n_L/n) (KL(rho || pi) + ln(2 t(n_L, n) / delta)) / (2 n_L) )
              + E_A sqrt( (C + ln(8 m n / delta) + 1) / (2 m n) )
    C  = KL(Q || P) + E_{P' ~ Q} sum_i KL(A(S_i) || P'),   t = 3 ln(n_L) sqrt(n_L (1 - n_L/n))

er is the risk of the stochastic predictor on new points of all n clients, her that on the points of
labeled ones.  Where this differs from the paper, and why:

- 2 t stands where the paper has t: each half of the bound has delta / 2.
- t is proved (Begin, Germain, Laviolette, Roy, AISTATS 2014) for 20 <= n_L <= n - 20 and losses in
  {0, 1}.  For losses in [0, 1], as clients' means are, replace each by a coin of that mean:
  exp(n_L transductive_kl) is convex in every loss, so its mean over samples only grows.
- With m_i points each, Hoeffding's lemma gives exp(lambda^2 / (8 n^2) sum_i 1/m_i), so m is the
  harmonic mean of the m_i.
- Variances are chosen from finite grids after training: delta is divided by the number of choices.
- Priors are centred at the initialisation, which comes from the seed, and not at 0.
- Where n_L = n the first root is 0 and t says nothing: nobody is unlabeled, and the bound is one
  for the labeled clients' new points.

Assumes: clients with labels were drawn uniformly at random; losses in [0, 1]; points of a client
are independent given the client.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowdup.certificate.checks import (
    check_delta,
    check_losses,
    check_not_negative,
    check_positive,
)
from flowdup.certificate.kl import kl_inverse, maurer_level, transductive_kl_inverse
from flowdup.errors import CertificateError

_LEAST = 20  # labeled clients, and unlabeled ones, for which t is proved


@dataclass(frozen=True)
class Clients:
    """How many clients there are, how many have labels, and how many points each has."""

    labeled: int  # n_L
    all: int  # n
    points: float  # m, the harmonic mean over clients

    @property
    def fraction(self) -> float:
        """n_L / n."""
        return self.labeled / self.all


@dataclass(frozen=True)
class Bound:
    """An upper bound and what it is made of."""

    bound: float
    terms: dict[str, float]


def begin_t(labeled: int, clients: int) -> float:
    """t(n_L, n) = 3 ln(n_L) sqrt(n_L (1 - n_L / n)); refused where it is not proved."""
    if labeled == clients:
        raise CertificateError(
            "all clients have labels, so nobody is left whom a transductive bound could speak of "
            "and its first term vanishes: train with data.labeled_fraction below 1, or use the "
            "route held-out-clients"
        )
    if not _LEAST <= labeled <= clients - _LEAST:
        raise CertificateError(
            f"{labeled} of {clients} clients have labels, and the transductive bound is proved for "
            f"at least {_LEAST} with and {_LEAST} without: use the route held-out-clients"
        )
    return 3 * math.log(labeled) * math.sqrt(labeled * (1 - labeled / clients))


def hypernetwork_term(divergence: float, clients: Clients, delta: float) -> float:
    """sqrt((1 - n_L/n) (KL(rho || pi) + ln(2 t / delta)) / (2 n_L))."""
    check_delta(delta)
    return math.sqrt((1 - clients.fraction) * begin_level(divergence, clients, delta / 2) / 2)


def begin_level(divergence: float, clients: Clients, delta: float) -> float:
    """(KL + ln(t / delta)) / n_L, what `transductive_kl` may be for every rho at once."""
    check_delta(delta)
    check_not_negative(divergence=divergence)
    logarithm = math.log(begin_t(clients.labeled, clients.all) / delta)
    return (divergence + logarithm) / clients.labeled


def models_term(complexity: float, clients: Clients, delta: float) -> float:
    """sqrt((C + ln(8 m n / delta) + 1) / (2 m n)) for one hypernetwork A."""
    check_delta(delta)
    check_not_negative(complexity=complexity)
    check_positive(points=clients.points, clients=clients.all)
    points = clients.points * clients.all
    return math.sqrt((complexity + math.log(8 * points / delta) + 1) / (2 * points))


def theorem_a1(
    risk: float,
    divergence: float,
    complexities: Sequence[float],
    clients: Clients,
    delta: float,
) -> Bound:
    """The general form; `complexities` are C(A) of hypernetworks sampled from rho.

    `risk` must be at least her: a Monte Carlo estimate needs its own confidence term
    (`kl.monte_carlo_bound`).  Beware: the mean over `complexities` stands for an expectation.
    """
    check_losses([risk])
    if not complexities:
        raise CertificateError("sample at least one hypernetwork, to know its complexity")
    first = hypernetwork_term(divergence, clients, delta)
    roots = [models_term(complexity, clients, delta) for complexity in complexities]
    second = math.fsum(roots) / len(roots)
    return Bound(
        risk + first + second, {"risk": risk, "hypernetwork": first, "client_models": second}
    )


def gaussian_divergence(squared_distance: float, variance: float) -> float:
    """KL of two Gaussians of the same variance: ||mu - mu_0||^2 / (2 alpha)."""
    check_not_negative(squared_distance=squared_distance)
    check_positive(variance=variance)
    return squared_distance / (2 * variance)


def gaussian_complexity(
    squared_distances: Sequence[float],
    k: int,
    alpha_theta: float,
    alpha_r: float,
    regularizer_squared: float,
) -> float:
    """C of theorem 1: sum_i (||h(S_i) - psi_r||^2 + k alpha_r) / (2 alpha_theta)
    + ||psi_r||^2 / (2 alpha_r), the last norm from where the hyper-prior is centred.
    """
    check_positive(k=k, alpha_theta=alpha_theta, alpha_r=alpha_r)
    noise = len(squared_distances) * k * alpha_r
    models = gaussian_divergence(math.fsum(squared_distances) + noise, alpha_theta)
    return models + gaussian_divergence(regularizer_squared, alpha_r)


def theorem_1(
    risk: float,
    hypernetwork_squared: float,
    alpha_h: float,
    complexities: Sequence[float],
    clients: Clients,
    delta: float,
    choices: int = 1,
) -> Bound:
    """The Gaussian choice; `choices` is how many settings of variances were tried in all.

    `hypernetwork_squared` is ||psi_h - psi_h0||^2, from the initialisation, and `complexities` come
    from `gaussian_complexity`.
    """
    check_positive(choices=choices)
    divergence = gaussian_divergence(hypernetwork_squared, alpha_h)
    return theorem_a1(risk, divergence, complexities, clients, delta / choices)


def transductive_bound(risk: float, divergence: float, clients: Clients, delta: float) -> Bound:
    """On the risk over all n clients' own points: no new points, and so no complexity of clients'
    models; by kl inversion instead of the square root.

    her of the labeled and the mean over all n satisfy
    transductive_kl(her || all) <= (KL(rho || pi) + ln(t / delta)) / n_L.  The term `unlabeled` is
    the mean over the n - n_L others that follows, (all - beta her) / (1 - beta); as the largest
    possible one is concave in her and 1 at her = 1, it may be read off an upper bound of her.
    """
    check_losses([risk])
    level = begin_level(divergence, clients, delta)
    found = transductive_kl_inverse(risk, level, clients.fraction)
    rest = rest_mean(risk, found, clients)
    return Bound(found, {"risk": risk, "level": level, "unlabeled": rest})


def kl_bound(
    risk: float, divergence: float, complexity: float, clients: Clients, delta: float
) -> Bound:
    """`theorem_a1` with both roots replaced by kl inversions; clients must be of equal size.

    The second step is Maurer's bound over m n independent losses, kl(all || er) <=
    (C + ln(4 sqrt(m n) / delta)) / (m n); that clients' means differ only helps (Hoeffding 1956),
    but weights must be equal.
    """
    own = transductive_bound(risk, divergence, clients, delta / 2)
    if clients.points != round(clients.points):
        raise CertificateError(
            "kl inversion needs clients of equal size: use theorem A.1, or clients of one size"
        )
    level = maurer_level(complexity, round(clients.points * clients.all), delta / 2)
    return Bound(kl_inverse(own.bound, level), {**own.terms, "own_points": own.bound})


def inductive_bound(risk: float, divergence: float, clients: int, delta: float) -> Bound:
    """On the mean risk of new clients, from n clients that the prior has not seen:
    kl(risk || true) <= (KL(rho || pi) + ln(2 sqrt n / delta)) / n.
    """
    check_losses([risk])
    check_not_negative(divergence=divergence)
    level = maurer_level(divergence, clients, delta)
    return Bound(kl_inverse(risk, level), {"risk": risk, "level": level})


def serfling_margin(labeled: int, clients: int, delta: float) -> float:
    """sqrt((1 - (n_L - 1) / n) ln(1 / delta) / (2 n_L)): how far the mean of one fixed predictor's
    losses over n_L clients, drawn without replacement, lies below that over all n (Serfling 1974).
    """
    check_delta(delta)
    if not 1 <= labeled <= clients:
        raise CertificateError(f"{labeled} of {clients} clients cannot be drawn: give 1 to all")
    return math.sqrt((1 - (labeled - 1) / clients) * math.log(1 / delta) / (2 * labeled))


def serfling_bound(risk: float, clients: Clients, delta: float) -> Bound:
    """`transductive_bound` of one predictor that was fixed before anyone's labels were drawn."""
    check_losses([risk])
    found = min(risk + serfling_margin(clients.labeled, clients.all, delta), 1.0)
    return Bound(found, {"risk": risk, "unlabeled": rest_mean(risk, found, clients)})


def rest_mean(risk: float, everyone: float, clients: Clients) -> float:
    """(all - beta her) / (1 - beta), the mean over those without labels, beta = n_L / n."""
    if clients.labeled == clients.all:
        raise CertificateError("all clients have labels: nobody is left to speak of")
    beta = clients.fraction
    return min((everyone - beta * risk) / (1 - beta), 1.0)
