"""The page of a comparison: what it tells of runs that are there, from their files."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from pages import Page

from flowdup.commands.compare import comparison_table
from flowdup.report.chart import Interval, Series, interval_chart, series_chart
from flowdup.run.comparison import collect, read_comparison, summarize
from flowdup.run.comparison_page import write_comparison_page
from flowdup.run.workers import Job

CLIENTS = 6
STUDY = """
[compare]
seeds = {seeds}
[compare.variants.flowdup]
[compare.variants.fedavg]
method = {{name = "fedavg"}}
[compare.variants.fedavg.grid]
"client.optimizer.lr" = [0.1, 0.3]
"server.optimizer.lr" = [0.5, 0.6]
"client.epochs" = [2]
[compare.variants."<b>hostile</b>"]
"""
LABELS = [
    "flowdup",
    "fedavg client lr=0.1, server lr=0.5",
    "fedavg client lr=0.1, server lr=0.6",
    "fedavg client lr=0.3, server lr=0.5",
    "fedavg client lr=0.3, server lr=0.6",
    "<b>hostile</b>",
]


def accuracy(variant: int, seed: int, client: int) -> float:
    return 50.0 + 7 * variant + seed + (client * (variant + 2)) % 5


def evaluation(variant: int, seed: int) -> dict[str, Any]:
    own = [accuracy(variant, seed, client) for client in range(CLIENTS)]
    found = {"mean": statistics.fmean(own), "std": 1.0, "worst_decile": min(own), "worst": min(own)}
    other = dict.fromkeys(found, 0.25)
    readings = ("transductive", "held_out")
    return {
        "method": "fedavg",
        "round": 20,
        "k": 10,
        "metrics": {reading: {"accuracy": found, "nll": other} for reading in readings},
        "clients": [
            {"name": f"c{i}", "traits": {}, "metrics": {r: {"accuracy": a} for r in readings}}
            for i, a in enumerate(own)
        ],
        "cost": {
            "points": 10,
            "parameters": 1234,
            "bytes_down": 5_000_000,
            "bytes_up": 4_000_000,
            "train_flops": 3_000_000_000,
            "personalize_flops": 2_000_000_000,
        },
        "device": "abacus",
        "versions": {"flowdup": "9.8.7"},
        "commit": "c0ffee",
    }


def make(folder: Path, seeds: list[int]) -> tuple[list[Job], Path]:
    """A comparison whose runs nobody ran."""
    (folder / "study.toml").write_text(STUDY.format(seeds=seeds))
    jobs = read_comparison(str(folder / "study.toml"), folder / "out")
    labels = list(dict.fromkeys(job.label for job in jobs))
    for job in jobs:
        variant, seed = labels.index(job.label), job.config.seed
        job.run.path.mkdir(parents=True)
        job.run.write_config(job.config)
        job.run.write_evaluation(evaluation(variant, seed))
        job.run.clients.write_text(json.dumps({"test": [{"sha256": f"{seed}-{i}"} for i in "abc"]}))
        for number in (10, 20):
            value = 40.0 + number + variant + seed
            job.run.append_metrics(
                {"round": number, "loss": 1.0, "seconds": 61.0, "validation_accuracy": value}
            )
    return jobs, folder / "out"


def write(jobs: list[Job], out: Path) -> Page:
    return Page(write_comparison_page(jobs, collect(jobs, out), out))


@pytest.fixture
def made(tmp_path: Path) -> tuple[list[Job], Path]:
    return make(tmp_path, [0, 1])


def text(page: Page) -> str:
    return re.sub(r"\n+", " ", page.text)


def test_variants_are_named_by_what_differs_between_them(made: tuple[list[Job], Path]) -> None:
    jobs, out = made
    assert list(dict.fromkeys(job.label for job in jobs)) == LABELS
    told = text(write(jobs, out))
    assert all(label in told for label in LABELS) and "epochs" not in told


def test_a_variant_that_is_named_as_another_s_grid_keeps_the_names_apart(tmp_path: Path) -> None:
    table = 'grid]\n"client.epochs" = [1, 2]\n[compare.variants."a epochs=2"]\n'
    (tmp_path / "s.toml").write_text(f"[compare]\nseeds = [0]\n[compare.variants.a.{table}")
    found = [job.label for job in read_comparison(str(tmp_path / "s.toml"), tmp_path)]
    assert found == ["a/client.epochs=1", "a/client.epochs=2", "a epochs=2"]


def test_the_page_needs_nothing_but_itself_and_escapes_names(
    made: tuple[list[Job], Path],
) -> None:
    page = write(*made)
    page.check_alone()
    assert page.count("b") == 0 and page.count("meta") == 3
    assert "prefers-color-scheme: dark" in page.source and "width=device-width" in page.source


def test_methods_stand_by_seeds_with_worst_decile_and_cost(made: tuple[list[Job], Path]) -> None:
    told = text(write(*made))
    means = [statistics.fmean(accuracy(0, seed, i) for i in range(CLIENTS)) for seed in (0, 1)]
    mean, spread = statistics.fmean(means), statistics.stdev(means)
    all_of_them, worst = f"{mean:.1f} ± {spread:.1f}", f"50.5 ± {spread:.1f}"  # 50 and 51
    seeds = f"{means[0]:.1f} {means[1]:.1f}"
    assert f"flowdup {all_of_them} {seeds} {worst} {all_of_them} {worst} " in told
    assert "flowdup 1,234 5.00 4.00 3.000 2.000 20 1 min 1 s" in told
    assert "Evaluated with flowdup 9.8.7, commit c0ffee, abacus. Page by flowdup" in told


def test_one_seed_has_no_deviation_on_the_page_and_in_the_table(tmp_path: Path) -> None:
    jobs, out = make(tmp_path, [3])
    page = write(jobs, out)
    table = page.source.partition("<table>")[2].partition("</table>")[0]
    assert "±" not in table and "One seed." in page.text
    summary = summarize(collect(jobs, out), out)
    assert summary["flowdup"]["std"] is None
    cells = [cell for column in comparison_table(summary).columns for cell in column.cells]
    assert not any("±" in str(cell) for cell in cells)


def test_differences_are_paired_by_client(made: tuple[list[Job], Path]) -> None:
    """Against the first variant, with the standard error of the mean over clients."""
    page = write(*made)
    means, errors = [], []
    for seed in (0, 1):
        found = [accuracy(2, seed, i) - accuracy(0, seed, i) for i in range(CLIENTS)]
        means.append(statistics.fmean(found))
        errors.append(statistics.stdev(found) / math.sqrt(CLIENTS))
    error = math.sqrt(sum(e**2 for e in errors)) / 2
    assert f"{LABELS[2]} +{statistics.fmean(means):.1f} ± {error:.1f}" in text(page)
    assert f"over {2 * CLIENTS} pairs of the same client" in text(page)


def test_clients_that_are_not_the_same_are_not_paired(made: tuple[list[Job], Path]) -> None:
    jobs, out = made
    for job in jobs:
        if job.label == LABELS[1]:
            job.run.clients.write_text(json.dumps({"test": [{"sha256": "others"}]}))
        if job.label == LABELS[2]:
            job.run.clients.write_text("no JSON")
    told = text(write(jobs, out))
    assert "2 variants had other clients" in told
    assert not re.search(f"{re.escape(LABELS[1])} [+\N{MINUS SIGN}]", told)


def test_every_seed_is_a_faint_curve_beside_the_mean(made: tuple[list[Job], Path]) -> None:
    page = write(*made)
    assert len(page.of_class("seed")) == 2 * len(LABELS)
    lines = [a for a in page.of_class("series") if "points" in a and a["class"] == "series"]
    assert len(lines) == len(LABELS)
    assert len({line["style"] for line in lines}) == len(LABELS)


def test_runs_without_results_are_named(made: tuple[list[Job], Path]) -> None:
    jobs, out = made
    jobs[0].run.evaluation.unlink()
    assert "Without results so far: flowdup (seed 0)." in text(write(jobs, out))
    for job in jobs[1:]:
        job.run.evaluation.unlink()
    assert "No run is finished and evaluated yet." in text(write(jobs, out))


def test_a_value_of_the_wrong_type_is_left_out(made: tuple[list[Job], Path]) -> None:
    jobs, out = made
    rows = collect(jobs, out)
    for client in (None, {}, {"metrics": 3}, {"metrics": {"transductive": {"accuracy": "x"}}}):
        jobs[0].run.write_evaluation(evaluation(0, 0) | {"clients": [client, client]})
        write_comparison_page(jobs, rows, out)


def test_the_mean_of_curves_is_over_the_rounds_that_all_seeds_have() -> None:
    one = Series("one", [[(1, 10.0), (2, 20.0)], [(1, 30.0), (3, 50.0)]])
    assert one.mean == [(1, 20.0)]
    assert series_chart([one], "x").count("<polyline") == 3


def test_an_interval_is_drawn_where_it_lies() -> None:
    rows = [Interval("a", -2.0, 1.0, "-2"), Interval("b", 4.0, None, "4", (3.0, 5.0))]
    chart = interval_chart(rows, "x", "points", zero=True)
    assert chart.count('class="reach"') == 1 and chart.count('class="one"') == 2
    middle = re.search(r'class="reach" x1="([\d.]+)" x2="([\d.]+)"', chart)
    assert middle is not None
    dot = re.search(r'class="end" cx="([\d.]+)"', chart)
    assert dot is not None
    assert sum(map(float, middle.groups())) / 2 == pytest.approx(float(dot[1]), abs=0.1)
