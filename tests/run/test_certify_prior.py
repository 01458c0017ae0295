"""A prior that was learned from some of the labeled clients: where training begins, who judges it,
and what is paid.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowdup.config import read_config
from flowdup.data import load_population
from flowdup.errors import CertificateError, ConfigError
from flowdup.evaluation import transductive_logits
from flowdup.personalize import load
from flowdup.random import Stream
from flowdup.run import RunFolder, Simulation, certify_run, train_run
from flowdup.run.certify_prior import ALPHA

SETTINGS: dict[str, Any] = {
    "model": "mlp",
    "data": {
        "points": 10,
        "overlap": True,
        "train_clients": 90,
        "validation_clients": 4,
        "test_clients": 4,
        "certify_clients": 20,
        "rotations": [0, 90],
    },
    "method": {
        "name": "flowdup",
        "subspace": {"k": 20},
        "hypernetwork": {"embedding": 8, "hidden": 6},
    },
    "client": {"batch_size": 10, "optimizer": {"lr": 0.1}},
    "server": {"rounds": 2, "cohort": 6},
    "run": {"evaluate_every": 2},
}


def settings(fraction: float, data: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    own = SETTINGS["data"] | {"labeled_fraction": fraction} | (data or {})
    return SETTINGS | {"data": own} | more


def trained(out: Path, table: dict[str, Any]) -> Path:
    list(train_run(read_config(table), out))
    return out


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("prior") / "run", settings(0.2))


@pytest.fixture(scope="module")
def rows(prior: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    fast = SETTINGS["server"] | {"optimizer": {"lr": 0.03}}  # so that it gets elsewhere
    further = settings(0.5, prior=str(prior), server=fast)
    out = trained(tmp_path_factory.mktemp("further") / "run", further)
    found = certify_run(out, ["pac-bayes"], draws=20)["certificate"]
    return {row["route"]: row for row in found}


def test_training_begins_where_the_prior_ended(prior: Path) -> None:
    learned = Simulation.resume(RunFolder(prior).read_config(), RunFolder(prior).kept)[1].psi
    began = Simulation(read_config(settings(0.5, prior=str(prior)))).initial_state().psi
    drawn = Simulation(read_config(settings(0.5))).initial_state().psi
    assert all(torch.equal(began[n], p) for n, p in learned.items())
    assert not all(torch.equal(began[n], p) for n, p in drawn.items())


def test_it_is_judged_by_labeled_clients_whom_the_prior_did_not_know(
    rows: dict[str, dict[str, Any]],
) -> None:
    for name in ("pac-bayes-prior", "pac-bayes-prior-h2", "pac-bayes-prior-serfling"):
        row = rows[name]
        assert (row["terms"]["n_L"], row["terms"]["n"], row["terms"]["known"]) == (27, 72, 18)
        assert row["bound"] > row["empirical_risk"] and "did not know" in row["data"]


def test_serflings_row_measures_the_priors_psi(
    rows: dict[str, dict[str, Any]], prior: Path
) -> None:
    simulation, state = Simulation.resume(RunFolder(prior).read_config(), RunFolder(prior).kept)
    some, everyone = (
        load_population(config.data, Stream(config.seed).child("data")).train
        for config in (read_config(settings(p)) for p in (0.5, 1.0))
    )
    hidden = [known for c, known in zip(some, everyone, strict=True) if not c.labeled]
    logits = transductive_logits(simulation.engine, state.deployed, hidden)
    wrong = [(z.argmax(1) != c.labels).double().mean() for z, c in zip(logits, hidden, strict=True)]
    measured = rows["pac-bayes-prior-serfling"]["measured_error_unlabeled"]
    assert measured == pytest.approx(float(torch.stack(wrong).mean()))
    assert measured != rows["pac-bayes-prior"]["measured_error_unlabeled"]


def test_what_moved_is_paid_for(rows: dict[str, dict[str, Any]]) -> None:
    for name in ("pac-bayes-prior", "pac-bayes-prior-h2"):
        terms = rows[name]["terms"]
        paid = terms["step"] ** 2 * terms["squared_distance"] / (2 * terms["alpha_h"])
        assert terms["divergence"] == pytest.approx(paid)
        assert terms["squared_distance"] > 0 and terms["choices"] == len(ALPHA)
    assert rows["pac-bayes-prior-serfling"]["terms"]["divergence"] == 0
    h, h2 = (
        rows[n]["terms"]["squared_distance"] for n in ("pac-bayes-prior", "pac-bayes-prior-h2")
    )
    assert h2 < h


def test_the_papers_bound_still_counts_from_what_the_seed_gave(
    rows: dict[str, dict[str, Any]], prior: Path
) -> None:
    alone = {row["route"]: row for row in certify_run(prior, draws=5)["certificate"]}
    assert "pac-bayes" in alone  # 18 labeled clients are too few for it
    assert "pac-bayes-prior" not in alone
    moved = rows["pac-bayes-plain"]["terms"]["hypernetwork_squared"]
    assert moved > rows["pac-bayes-prior"]["terms"]["squared_distance"]


@pytest.mark.parametrize(
    ("change", "fraction"),
    [({"data": {"points": 12}}, 0.5), ({}, 0.25)],
    ids=["other clients", "too few that it did not know"],
)
def test_a_prior_that_cannot_judge_is_refused(
    change: dict[str, Any], fraction: float, prior: Path, tmp_path: Path
) -> None:
    out = trained(tmp_path / "run", settings(fraction, prior=str(prior), **change))
    rows = certify_run(out, draws=5)["certificate"]
    refused = " ".join(row["refused"] for row in rows)
    wanted = "has other clients" if change else "at least 20 with and 20 without"
    assert wanted in refused
    if change:
        with pytest.raises(CertificateError, match="and from nothing"):
            certify_run(out, ["pac-bayes"], draws=5)


def test_a_warm_start_from_fewer_labels_pays_nothing_for_theta_0_and_the_trunk(
    tmp_path: Path,
) -> None:
    start = trained(tmp_path / "fedavg", settings(0.2, method={"name": "fedavg"}))
    out = trained(tmp_path / "run", settings(0.5, start=str(start)))
    rows = {row["route"]: row for row in certify_run(out, ["pac-bayes"], draws=10)["certificate"]}
    names = ("pac-bayes-prior", "pac-bayes-prior-h2", "pac-bayes-prior-serfling")
    assert tuple(rows) == (*names, "pac-bayes-held-out")
    assert all(rows[name]["terms"]["known"] == 18 for name in names)
    simulation, state = Simulation.resume(RunFolder(out).read_config(), RunFolder(out).kept)
    began = simulation.initial_state().psi
    moved = sum(float((state.psi[n] - p).square().sum()) for n, p in began.items() if n[0] == "h")
    assert rows["pac-bayes-prior"]["terms"]["squared_distance"] == pytest.approx(moved, rel=1e-4)


def test_a_start_that_is_no_run_has_seen_who_knows_whose_labels(tmp_path: Path) -> None:
    model = trained(tmp_path / "fedavg", settings(0.2, method={"name": "fedavg"}))
    x = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    load(model).personalize(x).save(tmp_path / "model.safetensors")
    start = str(tmp_path / "model.safetensors")
    out = trained(tmp_path / "run", settings(0.5, start=start))
    with pytest.raises(CertificateError, match="no prior is free of their labels"):
        certify_run(out, ["pac-bayes"], draws=5)


def test_a_prior_of_another_federation_is_refused(prior: Path) -> None:
    other = settings(0.5, prior=str(prior), seed=3)
    with pytest.raises(ConfigError, match="the same seed, model and method"):
        Simulation(read_config(other)).initial_state()
