"""Comparisons: which runs a table of variants stands for, and what is said of several seeds."""

from pathlib import Path

import pytest

from flowdup.run.comparison import COSTS, choose, read_comparison, summarize

STUDY = (
    'model = "mlp"\n'
    "data = {points = 20, overlap = true, train_clients = 20, test_clients = 12}\n"
    "server = {rounds = 2, cohort = 3}\n"
    "[compare]\nseeds = [0]\n"
    '[compare.variants.one]\nmethod = {name = "fedavg"}\n'
)


def test_a_variant_changes_what_it_names_and_nothing_beside_it(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(STUDY + "[compare.variants.more]\nserver = {cohort = 5}\n")
    one, more = (job.config for job in read_comparison(str(study), tmp_path))
    assert (one.server.rounds, one.server.cohort) == (2, 3)
    assert (more.server.rounds, more.server.cohort) == (2, 5)
    assert more.method.name == "flowdup"  # the default: only variant one is FedAvg
    assert more.data == one.data


def test_the_spread_over_seeds_is_that_of_a_sample(tmp_path: Path) -> None:
    costs = dict.fromkeys(COSTS, 1)
    rows = [
        {"variant": "one", "accuracy": value, "worst_decile": value / 2} | costs
        for value in (60.0, 70.0, 80.0)
    ]
    told = summarize(rows, tmp_path)["one"]
    assert told["mean"] == 70.0 and told["std"] == pytest.approx(10.0)
    assert told["worst_decile"]["std"] == pytest.approx(5.0)


GRID = (
    '[compare.variants.two]\nmethod = {name = "ld-fedavg"}\n'
    '[compare.variants.two.grid]\n"method.subspace.k" = [50, 60]\n"client.epochs" = [1, 2, 3]\n'
)


def test_a_grid_is_a_variant_for_every_combination_of_its_values(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(STUDY + GRID)
    jobs = read_comparison(str(study), tmp_path)
    found = choose(jobs, "two")
    assert [job.variant for job in found] == [
        f"two/method.subspace.k={k},client.epochs={epochs}"
        for k in (50, 60)
        for epochs in (1, 2, 3)
    ]
    told = [(j.config.method.settings.subspace.k, j.config.client.epochs) for j in found]
    assert told == [(k, epochs) for k in (50, 60) for epochs in (1, 2, 3)]
    assert [job.variant for job in choose(jobs, "*epochs=2")] == [
        found[1].variant,
        found[4].variant,
    ]
