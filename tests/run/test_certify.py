"""A certificate of a run: every route, what is refused, and the sets that personal models make."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands.here import flowdup

from flowdup.certificate.own_thresholds import own_levels
from flowdup.certificate.prediction_sets import SetThresholds
from flowdup.config import read_config
from flowdup.data import load_population
from flowdup.errors import CertificateError, CheckpointError, ConfigError
from flowdup.personalize import load, load_model
from flowdup.random import Stream
from flowdup.run import RunFolder, Simulation, certify_run, evaluate_run, train_run, write_report
from flowdup.run.stochastic import Noise, StochasticPredictor

SETTINGS: dict[str, Any] = {
    "model": "mlp",
    "data": {
        "points": 20,
        "overlap": True,
        "train_clients": 60,
        "validation_clients": 20,
        "test_clients": 12,
        "certify_clients": 35,
        "labeled_fraction": 0.5,
        "rotations": [0, 90],
    },
    "method": {
        "name": "flowdup",
        "subspace": {"k": 40},
        "hypernetwork": {"embedding": 12, "hidden": 10},
    },
    "client": {"batch_size": 10, "optimizer": {"lr": 0.1}},
    "server": {"rounds": 2, "cohort": 6},
    "run": {"evaluate_every": 2},
}
ROUTES = (
    *("held-out-clients", "client-quantile", "prediction-sets", "prediction-sets-em"),
    *("prediction-sets-own", "prediction-sets-em-own", "prediction-sets-fitted"),
    "prediction-sets-floor",
    *("prediction-sets-quantile", "prediction-sets-label-shift", "pac-bayes-plain", "pac-bayes-kl"),
    *("pac-bayes-own-points", "pac-bayes-compression", "pac-bayes-compression-models"),
    "pac-bayes-held-out",
)


def changed(**data: Any) -> dict[str, Any]:
    return SETTINGS | {"data": SETTINGS["data"] | data}


def trained(out: Path, settings: dict[str, Any] = SETTINGS) -> Path:
    list(train_run(read_config(settings), out))
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("certified") / "run")


@pytest.fixture(scope="module")
def certificate(run: Path) -> dict[str, Any]:
    return certify_run(run, draws=30)


def by_route(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["route"]: row for row in rows}


def test_every_route_has_a_row_with_its_terms(certificate: dict[str, Any]) -> None:
    rows = by_route(certificate["certificate"])
    assert tuple(rows) == ROUTES
    for name, row in rows.items():
        assert row["delta"] == 0.05 and row["assumes"] and row["data"] and row["terms"]
        assert not row["refused"]
        aside = row["data"] == "35 clients set aside"
        assert ("made of the images set aside" in row["assumes"]) == aside
        assert (row["bound"] is None) == (name == "prediction-sets-label-shift")
        assert 0 <= row["measured_error_unlabeled"] <= 1


def test_bounds_lie_above_the_risk_that_they_start_from(certificate: dict[str, Any]) -> None:
    for row in certificate["certificate"]:
        if (risk := row["empirical_risk"]) is not None:
            same = row["route"] == "client-quantile" and row["bound"] == risk  # both are errors
            assert row["bound"] > risk or same
    measured = certificate["measured"]
    assert set(measured) == {"labeled", "unlabeled", "test", "aside"}
    rows = by_route(certificate["certificate"])
    assert rows["held-out-clients"]["empirical_risk"] == measured["aside"]
    terms = rows["pac-bayes-plain"]["terms"]
    assert (terms["n_L"], terms["n"], terms["m"]) == (30, 60, 20)
    parts = sum(terms[name] for name in ("risk", "hypernetwork", "client_models"))
    assert rows["pac-bayes-plain"]["bound"] == pytest.approx(parts)


def test_a_quantile_is_measured_by_the_same_one_of_test_clients(
    run: Path, certificate: dict[str, Any]
) -> None:
    row = by_route(certificate["certificate"])["client-quantile"]
    clients = evaluate_run(run)["clients"]
    errors = [1 - client["metrics"]["transductive"]["accuracy"] / 100 for client in clients]
    found = row["measured_error_unlabeled"]
    assert sum(e <= found + 1e-9 for e in errors) >= 0.9 * len(errors)
    assert sum(e < found - 1e-9 for e in errors) < 0.9 * len(errors)


def test_the_hypernetwork_is_measured_from_where_it_began(run: Path, tmp_path: Path) -> None:
    """After no round at all its distance is 0, so that the prior costs nothing."""
    settings = SETTINGS | {"server": {"rounds": 1, "cohort": 6, "optimizer": {"lr": 1e-30}}}
    rows = by_route(certify_run(trained(tmp_path / "run", settings), draws=5)["certificate"])
    assert rows["pac-bayes-plain"]["terms"]["hypernetwork_squared"] < 1e-12


def test_the_same_run_has_the_same_certificate(run: Path, certificate: dict[str, Any]) -> None:
    again = certify_run(run, ["pac-bayes"], draws=30)["certificate"]
    assert again == [r for r in certificate["certificate"] if r["route"].startswith("pac-bayes")]


def test_personal_models_make_sets_and_keep_them_when_saved(
    run: Path, certificate: dict[str, Any], tmp_path: Path
) -> None:
    config = RunFolder(run).read_config()
    client = load_population(config.data, Stream(config.seed).child("data")).test[0]
    model = load(run).personalize(client.x)
    sets, wider = model.predict_set(client.x), model.predict_set(client.x, coverage=0.95)
    assert sets.shape == (20, 10) and sets.dtype == torch.bool
    assert bool((wider | ~sets).all())
    level = by_route(certificate["certificate"])["prediction-sets-own"]["terms"]["threshold"]
    right = own_levels(model.logits(client.x).double().softmax(1).numpy()) <= level
    assert torch.equal(sets, torch.from_numpy(right)) and bool(sets.any())
    model.save(tmp_path / "own.safetensors")
    assert torch.equal(load_model(tmp_path / "own.safetensors").predict_set(client.x), sets)
    np.save(tmp_path / "x.npy", client.x.numpy())
    words = ("predict", tmp_path / "own.safetensors", "--input", tmp_path / "x.npy", "--set", "0.9")
    printed = json.loads(flowdup(*words, "--json").out)["sets"]
    assert [list(map(int, own)) for own in printed] == [
        torch.nonzero(row).flatten().tolist() for row in sets
    ]
    assert flowdup(*words).out.splitlines()[0].endswith("}")
    with pytest.raises(CertificateError, match=r"0\.97 is the most that was calibrated"):
        model.predict_set(client.x, 0.99)


def test_sets_tell_points_apart_whose_probability_is_1_in_float32(tmp_path: Path) -> None:
    out = trained(tmp_path / "run", changed(certify_clients=0) | {"method": {"name": "fedavg"}})
    config, federation = RunFolder(out).read_config(), load(out)
    client = load_population(config.data, Stream(config.seed).child("data")).test[0]
    last = [n for n, p in federation.psi.items() if len(p) == 10]
    assert len(last) == 2  # weights and biases
    first, second = federation.personalize(client.x).logits(client.x).topk(2).values.T
    for name in last:
        federation.psi[name] *= 23 / float((first - second).median())
    federation.levels = SetThresholds((0.5,), (0.5,))
    model = federation.personalize(client.x)
    sure = model.predict_proba(client.x).amax(1) == 1
    sets = model.predict_set(client.x, 0.5)
    right = own_levels(model.logits(client.x).double().softmax(1).numpy()) <= 0.5
    assert torch.equal(sets, torch.from_numpy(right))
    assert 0 < int(sets[sure].any(1).sum()) < int(sure.sum())


def test_a_model_of_a_run_without_a_certificate_says_what_to_do(tmp_path: Path) -> None:
    out = trained(tmp_path / "run", changed(certify_clients=0))
    x = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    with pytest.raises(CertificateError, match="run `flowdup certify` on the run folder"):
        load(out).personalize(x).predict_set(x)


def test_a_certificate_of_another_psi_is_not_used(run: Path, certificate: dict[str, Any]) -> None:
    path = RunFolder(run).certificate
    stored = path.read_text()
    try:
        path.write_text(stored.replace(certificate["psi_sha256"], "0" * 64))
        assert load(run).levels is None
        path.write_text("{}")
        with pytest.raises(CheckpointError, match="certify again"):
            load(run)
    finally:
        path.write_text(stored)
    assert load(run).levels is not None


def test_a_foreign_file_beside_a_run_folder_is_nobodys_certificate(
    run: Path, certificate: dict[str, Any]
) -> None:
    assert load(run / "best").levels == load(run).levels is not None
    foreign, own = run.parent / "certificate.json", RunFolder(run).certificate
    stored = own.read_text()
    try:
        foreign.write_text("[]")
        assert load(run).levels is not None
        own.unlink()
        assert load(run).levels is None
    finally:
        foreign.unlink()
        own.write_text(stored)


def test_the_command_prints_rows_and_the_page_has_them(run: Path) -> None:
    ended = flowdup("certify", run, "--route", "held-out-clients", "--json")
    assert [row["route"] for row in json.loads(ended.out)] == ["held-out-clients"]
    ended = flowdup("certify", run, "--draws", "5", "--delta", "0.1")
    assert "confidence 90%" in ended.out and "pac-bayes-plain" in ended.out
    assert "at least 90% of clients have an error of at most" in ended.out
    page = (run / "report.html").read_text()
    assert "Error of clients without labels" in page and "held-out-clients" in page
    assert 'alt="Bounds against the number of clients set aside, and against p"' in page
    assert (run / "certificate.png").is_file() and (run / "certificate.svg").is_file()


def test_the_page_says_of_which_model_a_certificate_is(tmp_path: Path) -> None:
    last = SETTINGS | {"run": {"evaluate_every": 2, "keep": "last"}}
    out = trained(tmp_path / "run", last)
    certify_run(out, ["held-out-clients"])
    assert "<p>Of the model after round 2.</p>" in (out / "report.html").read_text()
    longer = read_config(last | {"server": {"rounds": 4, "cohort": 6}})
    list(train_run(longer, out, resume=True))
    page = (out / "report.html").read_text()
    assert "not of the model that counts now</strong>, but of the model after round 2: run" in page
    certify_run(out, ["held-out-clients"])
    assert "<p>Of the model after round 4.</p>" in (out / "report.html").read_text()
    (out / "checkpoint" / "checkpoint.json").write_text("{}")
    page = write_report(out).read_text()
    assert "after round 4; whether it is the one that counts is not known" in page


def test_used_clients_are_refused(run: Path, tmp_path: Path) -> None:
    out = trained(tmp_path / "without", changed(certify_clients=0))
    with pytest.raises(CertificateError, match=r"set no clients aside.*data.certify_clients = 100"):
        certify_run(out)
    population = load_population(
        read_config(SETTINGS).data, Stream(read_config(SETTINGS).seed).child("data")
    )
    for group in ("train", "validation", "test"):
        one = getattr(population, group)[0]
        stored = tmp_path / f"{group}.npz"
        labels = one.labels if one.labeled else torch.zeros(len(one), dtype=torch.int64)
        np.savez(stored, x=one.x.numpy(), y=labels.numpy())
        with pytest.raises(CertificateError, match=f"was used as a {group} client"):
            certify_run(run, source=stored)
    reused = replace(population, certify=[population.validation[0]])
    with pytest.raises(CertificateError, match="'validation-0' was used as a validation client"):
        certify_run(run, population=reused)


def test_other_clients_can_certify(run: Path, tmp_path: Path) -> None:
    others = load_population(read_config(SETTINGS).data, Stream(99))
    for client in others.test:
        np.savez(tmp_path / f"{client.name}.npz", x=client.x.numpy(), y=client.labels.numpy())
    rows = certify_run(run, ["held-out-clients"], source=tmp_path)["certificate"]
    assert rows[0]["terms"]["clients"] == len(others.test)
    with pytest.raises(CertificateError, match="set at least 29 aside"):
        certify_run(run, ["client-quantile"], source=tmp_path)


def test_a_bound_that_test_clients_exceed_is_told(run: Path, tmp_path: Path) -> None:
    """Clients whose labels are what their models say: the error is 0, that of test clients not."""
    others = load_population(read_config(SETTINGS).data, Stream(99)).test
    for client in others:
        y = load(run).personalize(client.x).predict(client.x)
        np.savez(tmp_path / f"{client.name}.npz", x=client.x.numpy(), y=np.asarray(y))
    words = ("certify", run, "--route", "held-out-clients")
    told = flowdup(*words, "--route", "prediction-sets", "--input", tmp_path).out
    assert told.count("measured above its bound") == 1
    assert "held-out-clients: measured above its bound, by chance" in told
    assert "above its bound" not in flowdup(*words).out


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (changed(labeled_fraction=1.0), "its first term vanishes"),
        (changed(labeled_fraction=0.2), "at least 20 with and 20 without"),
        (changed(labeled_traits={"rotation": [0]}), "not drawn at random"),
        (SETTINGS | {"method": {"name": "fedavg"}}, "is about the method 'flowdup'"),
        (
            SETTINGS | {"before": [{"method": {"name": "fedavg"}, "server": {"rounds": 1}}]},
            "no prior is free of their labels",
        ),
    ],
)
def test_where_the_papers_bound_cannot_be_given_it_says_why(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    out = trained(tmp_path / "run", settings)
    rows = certify_run(out, draws=5)["certificate"]
    refused = [row for row in rows if row["route"] == "pac-bayes"]
    assert refused and sentence in refused[0]["refused"] and refused[0]["bound"] is None
    assert by_route(rows)["held-out-clients"]["bound"] is not None
    with pytest.raises(CertificateError, match=sentence):
        certify_run(out, ["pac-bayes"])


@pytest.mark.parametrize("given", ["memory", "files"])
def test_labels_that_nobody_drew_at_random_are_refused(given: str, tmp_path: Path) -> None:
    """Those of clients at rotation 0 alone, which are as many as a draw would give."""
    config = read_config(changed(labeled_fraction=1.0))
    found = load_population(config.data, Stream(config.seed).child("data"))
    train = [c if c.traits["rotation"] == 0 else c.unlabeled() for c in found.train]
    share = sum(c.labeled for c in train) / len(train)
    assert 20 / 60 <= share <= 40 / 60
    out, population = tmp_path / "run", replace(found, train=train)
    sentence = "all with labels, or use the route held-out-clients"
    if given == "memory":
        list(train_run(read_config(changed(labeled_fraction=share)), out, population=population))
        with pytest.raises(CertificateError, match=sentence):
            certify_run(out, ["pac-bayes"], population=population)
        return
    for group in ("train", "validation", "test", "certify"):
        for i, client in enumerate(getattr(population, group)):
            path = tmp_path / "clients" / group / f"{group}-{i}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            y = {"y": client.labels.numpy()} if client.labeled else {}
            np.savez(path, x=client.x.numpy(), **y)
    data = {"source": "folder", "path": str(tmp_path / "clients"), "labeled_fraction": 1.0}
    trained(out, SETTINGS | {"data": data})
    with pytest.raises(CertificateError, match=sentence):
        certify_run(out, ["pac-bayes"])


def test_what_is_asked_for_must_make_sense(run: Path) -> None:
    with pytest.raises(ConfigError, match="there is no route 'luck'"):
        certify_run(run, ["luck"])
    with pytest.raises(CertificateError, match="delta is 0"):
        certify_run(run, delta=0.0)


@pytest.mark.parametrize("option", ["coverage", "share"])
@pytest.mark.parametrize("value", ["1.2", "1.0", "0.0", "-3.0", "nan"])
def test_a_coverage_or_a_share_outside_0_and_1_is_refused_first(
    option: str, value: str, run: Path, certificate: dict[str, Any]
) -> None:
    stored = RunFolder(run).certificate.read_bytes()
    ended = flowdup("certify", run, f"--{option}", value)
    assert ended.code == 2 and not ended.out
    assert ended.error == f"error: {option} is {value}: give a share above 0 and below 1\n"
    assert RunFolder(run).certificate.read_bytes() == stored


def test_a_checkpoint_without_its_seed_is_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for path in run.rglob("*"):
        target = copy / path.relative_to(run)
        target.mkdir(exist_ok=True) if path.is_dir() else target.write_bytes(path.read_bytes())
    for header in copy.rglob("checkpoint.json"):
        header.write_text(header.read_text().replace('"seed"', '"sead"'))
    with pytest.raises(CheckpointError, match=r"restore|copy"):
        certify_run(copy)


def test_without_noise_the_sampled_predictor_is_the_deployed_one(
    run: Path, certificate: dict[str, Any]
) -> None:
    simulation, state = Simulation.resume(RunFolder(run).read_config(), RunFolder(run).kept)
    predictor = StochasticPredictor(simulation.method, state.deployed, Stream(1))
    aside = simulation.population.certify
    errors = [sample.error for sample in predictor.sample(aside, Noise(0.0, 0.0, math.inf))]
    assert np.mean(errors) == pytest.approx(certificate["measured"]["aside"], abs=0.01)
    noisy = [sample.error for sample in predictor.sample(aside, Noise(10.0, 10.0, math.inf))]
    assert np.mean(noisy) > 0.7
    most = (0.1 + float(state.deployed["psi_r"].norm())) ** 2
    wild = predictor.distances(aside, Noise(1.0, 0.0, 0.01), 20)
    assert (
        max(wild)
        <= most * (1 + 1e-5)
        < max(predictor.distances(aside, Noise(1.0, 0.0, math.inf), 20))
    )


def test_two_samples_differ_and_only_h2_moves_where_only_h2_is_random(run: Path) -> None:
    simulation, state = Simulation.resume(RunFolder(run).read_config(), RunFolder(run).kept)
    both = [
        StochasticPredictor(simulation.method, state.deployed, Stream(1), random)
        for random in ("h", "h2")
    ]
    assert all(name.startswith("h2.") for name in both[1].names) and both[1].names
    assert {*both[1].names} < {*both[0].names} and "psi_r" not in both[0].names
    client, noise = simulation.population.certify[0], Noise(1e-2, 0.0, math.inf)
    assert both[0].sample([client], noise) != both[0].sample([client], noise)
