"""Every formula of a certificate against mpmath, which evaluates it independently, to 1e-12."""

import math
import random
from collections.abc import Callable

import mpmath as mp
import pytest

from flowdup.certificate import client_quantile, compression, kl, pac_bayes
from flowdup.certificate.checks import harmonic_mean
from flowdup.certificate.held_out_clients import mean_error_bound
from flowdup.certificate.pac_bayes import Clients

mp.mp.dps = 40
DRAWS = range(40)


def near(found: float, right: mp.mpf) -> bool:
    return abs(mp.mpf(found) - right) <= mp.mpf(10) ** -12 * max(1, abs(right))


def draw(seed: int) -> random.Random:
    return random.Random(seed)


def mp_kl(q: mp.mpf, p: mp.mpf) -> mp.mpf:
    parts = [(q, p), (1 - q, 1 - p)]
    return mp.fsum(a * mp.log(a / b) for a, b in parts if a)


def solve(f: Callable[[mp.mpf], mp.mpf], low: mp.mpf, high: mp.mpf) -> mp.mpf:
    """Where an increasing f is 0."""
    for _ in range(130):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return low


@pytest.mark.parametrize("seed", DRAWS)
def test_kl_and_its_inverse(seed: int) -> None:
    r = draw(seed)
    q, p, bound = r.random(), r.random(), r.uniform(0.001, 2)
    assert near(kl.binary_kl(q, p), mp_kl(mp.mpf(q), mp.mpf(p)))
    right = solve(lambda x: mp_kl(mp.mpf(q), x) - bound, mp.mpf(q), mp.mpf(1))
    assert near(kl.kl_inverse(q, bound), right)


@pytest.mark.parametrize("seed", DRAWS)
def test_transductive_kl_and_its_inverse(seed: int) -> None:
    r = draw(seed)
    q, beta = mp.mpf(r.uniform(0.01, 0.9)), mp.mpf(r.uniform(0.05, 0.9))

    def divergence(p: mp.mpf) -> mp.mpf:
        rest = (p - beta * q) / (1 - beta)
        return mp_kl(q, p) + (1 - beta) / beta * mp_kl(rest, p)

    most = beta * q + 1 - beta
    p, bound = q + r.random() * (most - q) * mp.mpf("0.999"), r.uniform(0.001, 0.3)
    args = float(q), float(p), float(beta)
    assert near(kl.transductive_kl(*args), divergence(mp.mpf(float(p))))
    reachable = divergence(most - mp.mpf(10) ** -30) > bound
    right = solve(lambda x: divergence(x) - bound, q, most) if reachable else most
    assert near(kl.transductive_kl_inverse(float(q), bound, float(beta)), right)


@pytest.mark.parametrize("seed", DRAWS)
def test_the_bound_of_held_out_clients(seed: int) -> None:
    r = draw(seed)
    errors = [r.random() ** 3 for _ in range(r.randint(2, 300))]
    delta, q = r.uniform(0.001, 0.5), mp.fsum(map(mp.mpf, errors)) / len(errors)
    level = mp.log(1 / mp.mpf(delta)) / len(errors)
    right = solve(lambda x: mp_kl(q, x) - level, q, mp.mpf(1))
    assert near(mean_error_bound(errors, delta), right)
    assert near(kl.monte_carlo_bound(errors, delta), right)


@pytest.mark.parametrize("seed", DRAWS)
def test_binomial_order_statistics(seed: int) -> None:
    r = draw(seed)
    n = r.randint(1, 400)
    k, p, delta = r.randint(1, n), r.random(), r.uniform(0.001, 0.5)

    def tail(s: mp.mpf) -> mp.mpf:
        return mp.betainc(k, n - k + 1, 0, s, regularized=True)

    assert near(client_quantile.binomial_tail(k, n, p), tail(mp.mpf(p)))
    right = solve(lambda s: tail(s) - delta, mp.mpf(0), mp.mpf(1))
    assert near(client_quantile.share_bound(k, n, delta), right)
    margin = mp.sqrt(mp.log(1 / mp.mpf(delta)) / (2 * n))
    assert near(client_quantile.dkw_margin(n, delta), margin)
    share = r.uniform(0.1, 0.99)
    needed = client_quantile.clients_needed(share, delta)
    assert mp.mpf(share) ** needed <= delta < mp.mpf(share) ** (needed - 1)


def random_clients(r: random.Random) -> Clients:
    n = r.randint(40, 3000)
    sizes = [r.randint(1, 300) for _ in range(5)]
    return Clients(r.randint(20, n - 20), n, harmonic_mean(sizes))


def mp_begin(clients: Clients) -> mp.mpf:
    n_l, n = mp.mpf(clients.labeled), mp.mpf(clients.all)
    return 3 * mp.log(n_l) * mp.sqrt(n_l * (1 - n_l / n))


@pytest.mark.parametrize("seed", DRAWS)
def test_theorem_1_with_the_factor_of_both_halves(seed: int) -> None:
    r = draw(seed)
    clients, delta, risk = random_clients(r), r.uniform(0.001, 0.5), r.random()
    n_l, n, m = (mp.mpf(x) for x in (clients.labeled, clients.all, clients.points))
    norm, alpha_h, alpha_t, alpha_r = (10 ** r.uniform(-4, 3) for _ in range(4))
    distances, k, psi_r = [10 ** r.uniform(-3, 2) for _ in range(7)], r.randint(1, 999), r.random()
    choices = r.randint(1, 50)
    share = mp.mpf(delta) / choices
    c = mp.fsum(mp.mpf(d) + k * mp.mpf(alpha_r) for d in distances) / (2 * mp.mpf(alpha_t))
    c += mp.mpf(psi_r) / (2 * mp.mpf(alpha_r))
    first = mp.mpf(norm) / (2 * mp.mpf(alpha_h)) + mp.log(2 * mp_begin(clients) / share)
    right = risk + mp.sqrt((1 - n_l / n) * first / (2 * n_l))
    right += mp.sqrt((c + mp.log(8 * m * n / share) + 1) / (2 * m * n))
    complexity = pac_bayes.gaussian_complexity(distances, k, alpha_t, alpha_r, psi_r)
    assert near(complexity, c)
    found = pac_bayes.theorem_1(risk, norm, alpha_h, [complexity], clients, delta, choices)
    assert near(found.bound, right)
    assert math.isclose(sum(found.terms.values()), found.bound)


@pytest.mark.parametrize("seed", DRAWS)
def test_theorem_a1_takes_the_mean_of_roots(seed: int) -> None:
    r = draw(seed)
    clients, delta, divergence = random_clients(r), r.uniform(0.001, 0.5), 10 ** r.uniform(-2, 4)
    complexities = [10 ** r.uniform(-2, 5) for _ in range(r.randint(1, 9))]
    n_l, n, m = (mp.mpf(x) for x in (clients.labeled, clients.all, clients.points))
    level = (divergence + mp.log(2 * mp_begin(clients) / mp.mpf(delta))) / n_l
    roots = [
        mp.sqrt((mp.mpf(c) + mp.log(8 * m * n / mp.mpf(delta)) + 1) / (2 * m * n))
        for c in complexities
    ]
    right = mp.sqrt((1 - n_l / n) * level / 2) + mp.fsum(roots) / len(roots)
    assert near(pac_bayes.theorem_a1(0.0, divergence, complexities, clients, delta).bound, right)


@pytest.mark.parametrize("seed", DRAWS)
def test_kl_forms_of_the_bound(seed: int) -> None:
    r = draw(seed)
    n, m = r.randint(60, 600), r.randint(1, 100)
    clients, delta = Clients(r.randint(20, n - 20), n, float(m)), r.uniform(0.01, 0.4)
    risk, divergence, complexity = r.uniform(0.01, 0.3), r.uniform(0, 20), r.uniform(0, 100)
    level = (divergence + mp.log(2 * mp_begin(clients) / mp.mpf(delta))) / clients.labeled
    beta, q = mp.mpf(clients.labeled) / n, mp.mpf(risk)

    def gap(p: mp.mpf) -> mp.mpf:
        return mp_kl(q, p) + (1 - beta) / beta * mp_kl((p - beta * q) / (1 - beta), p) - level

    most = beta * q + 1 - beta
    own = solve(gap, q, most) if gap(most - mp.mpf(10) ** -30) > 0 else most
    total = n * m
    second = (complexity + mp.log(2 * mp.sqrt(total) / (mp.mpf(delta) / 2))) / total
    right = solve(lambda p: mp_kl(own, p) - second, own, mp.mpf(1))
    found = pac_bayes.kl_bound(risk, divergence, complexity, clients, delta)
    assert near(found.terms["own_points"], own)
    assert near(found.terms["unlabeled"], (own - beta * q) / (1 - beta))
    assert near(found.bound, right)
    maurer = (divergence + mp.log(2 * mp.sqrt(n) / mp.mpf(delta))) / n
    new = solve(lambda p: mp_kl(q, p) - maurer, q, mp.mpf(1))
    assert near(pac_bayes.inductive_bound(risk, divergence, n, delta).bound, new)


@pytest.mark.parametrize("seed", DRAWS)
def test_serfling_and_the_harmonic_mean(seed: int) -> None:
    r = draw(seed)
    n = r.randint(1, 900)
    n_l, delta = r.randint(1, n), r.uniform(0.001, 0.9)
    right = mp.sqrt((1 - mp.mpf(n_l - 1) / n) * mp.log(1 / mp.mpf(delta)) / (2 * n_l))
    assert near(pac_bayes.serfling_margin(n_l, n, delta), right)
    if n_l < n:
        risk, found = r.random(), Clients(n_l, n, 1.0)
        bound = pac_bayes.serfling_bound(risk, found, delta)
        everyone = min(mp.mpf(risk) + right, mp.mpf(1))
        assert near(bound.bound, everyone)
        rest = (n * everyone - n_l * mp.mpf(risk)) / (n - n_l)
        assert near(bound.terms["unlabeled"], min(rest, mp.mpf(1)))
    sizes = [r.randint(1, 999) for _ in range(r.randint(1, 30))]
    assert near(harmonic_mean(sizes), len(sizes) / mp.fsum(mp.mpf(1) / s for s in sizes))


@pytest.mark.parametrize("seed", DRAWS)
def test_code_lengths(seed: int) -> None:
    r = draw(seed)
    counts = [r.randint(0, 500) for _ in range(r.randint(1, 20))] + [1]
    n, levels = sum(counts), len(counts)
    bits = -mp.fsum(c * mp.log(mp.mpf(c) / n, 2) for c in counts if c) + 2 + 16 * levels
    bits += levels * mp.ceil(mp.log(n + 1, 2)) + 2 * mp.log(levels, 2) + 3
    assert near(compression.code_length(counts), bits * mp.log(2))


@pytest.mark.parametrize("labeled, clients", [(20, 40), (20, 60), (40, 60), (50, 120), (30, 200)])
def test_t_bounds_the_moment_that_it_is_proved_for(labeled: int, clients: int) -> None:
    """max over K of E exp(n_L transductive_kl(k / n_L, K / n)), k hypergeometric, is at most t."""
    worst = max(exact_moment(labeled, clients, ones) for ones in range(clients + 1))
    assert 1 < worst <= pac_bayes.begin_t(labeled, clients)


def exact_moment(labeled: int, clients: int, ones: int) -> float:
    everyone = math.comb(clients, labeled)
    total = 0.0
    for k in range(max(0, labeled + ones - clients), min(labeled, ones) + 1):
        chance = math.comb(ones, k) * math.comb(clients - ones, labeled - k) / everyone
        gap = kl.transductive_kl(k / labeled, ones / clients, labeled / clients)
        total += chance * math.exp(labeled * gap)
    return total
