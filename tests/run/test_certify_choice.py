"""Which variances and radius the paper's bound is evaluated at."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowdup.certificate.pac_bayes import Clients, gaussian_complexity, theorem_1
from flowdup.config import read_config
from flowdup.run import certify_run, train_run
from flowdup.run.certify_pac_bayes import ALPHA_H, ALPHA_R, ALPHA_THETA, CHOICES, RADII
from flowdup.run.stochastic import Sample

K = 40
SETTINGS: dict[str, Any] = {
    "model": "mlp",
    "data": {
        "points": 10,
        "overlap": True,
        "train_clients": 60,
        "validation_clients": 4,
        "test_clients": 4,
        "certify_clients": 20,
        "labeled_fraction": 0.5,
    },
    "method": {
        "name": "flowdup",
        "subspace": {"k": K},
        "hypernetwork": {"embedding": 12, "hidden": 10},
    },
    "client": {"batch_size": 10, "optimizer": {"lr": 0.1}},
    "server": {"rounds": 2, "cohort": 6, "optimizer": {"lr": 0.3}},  # far from its start
    "run": {"evaluate_every": 2},
}


def test_the_bound_is_no_worse_than_with_models_clipped_to_almost_nothing(tmp_path: Path) -> None:
    """Which then are wrong everywhere, but cost nothing."""
    list(train_run(read_config(SETTINGS), tmp_path))
    rows = certify_run(tmp_path, ["pac-bayes"], draws=100)["certificate"]
    (row,) = [row for row in rows if row["route"] == "pac-bayes-plain"]
    terms = row["terms"]
    assert terms["choices"] == CHOICES == len([*product(ALPHA_H, ALPHA_THETA, ALPHA_R, RADII)])
    clients, psi_r = Clients(terms["n_L"], terms["n"], terms["m"]), terms["psi_r_squared"]
    most = (math.sqrt(RADII[0]) + math.sqrt(psi_r)) ** 2
    clipped = [
        theorem_1(1.0, terms["hypernetwork_squared"], alpha_h, [c], clients, 0.04, CHOICES).bound
        for alpha_h, alpha_theta, alpha_r in product(ALPHA_H, ALPHA_THETA, ALPHA_R)
        for c in [gaussian_complexity([most] * clients.all, K, alpha_theta, alpha_r, psi_r)]
    ]
    assert row["bound"] <= min(clipped) + 0.02  # it was chosen by other samples
    assert terms["alpha_theta"] in ALPHA_THETA and terms["radius_squared"] in RADII


@pytest.mark.parametrize("radius_squared", [0.01, 1.0, 30.0, 1e4])
def test_distances_after_clipping_follow_from_those_before(radius_squared: float) -> None:
    v, psi_r = np.random.default_rng(5).normal(size=(2, K))
    clipped = v * min(math.sqrt(radius_squared / (v @ v)), 1)
    sample = Sample(0.0, float(((v - psi_r) ** 2).sum()), float(v @ v))
    found = sample.clipped_distance_squared(radius_squared, float(psi_r @ psi_r))
    assert found == pytest.approx(float(((clipped - psi_r) ** 2).sum()))
