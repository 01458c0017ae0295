"""Comparisons: which runs a table of variants stands for, and what a row of results holds."""

import json
from pathlib import Path

import pytest

import flowdup
from flowdup.errors import CheckpointError, ConfigError
from flowdup.metrics import METRICS, accuracy
from flowdup.run.comparison import COSTS, choose, collect, read_comparison, summarize
from flowdup.run.workers import Job, run_comparison

STUDY = (
    'model = "mlp"\n'
    "data = {points = 20, overlap = true, train_clients = 20, test_clients = 12}\n"
    "server = {rounds = 2, cohort = 3}\n"
    "[compare]\nseeds = [0]\n"
    '[compare.variants.one]\nmethod = {name = "fedavg"}\n'
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Job], Path]:
    """A comparison of one run."""
    out = tmp_path_factory.mktemp("comparison")
    (out / "study.toml").write_text(STUDY)
    jobs = read_comparison(str(out / "study.toml"), out)
    assert list(run_comparison(jobs, 1)) == jobs
    return jobs, out


def test_a_row_has_accuracy_beside_its_worst_decile_and_the_mean_of_other_metrics(
    done: tuple[list[Job], Path],
) -> None:
    jobs, out = done
    (row,) = collect(jobs, out)
    found = jobs[0].run.read_evaluation()["metrics"]
    for prefix, key, reading in (
        ("", "accuracy", "transductive"),
        ("held_out_", "held_out", "held_out"),
    ):
        table = found[reading]
        assert row[key] == table["accuracy"]["mean"]
        assert row[f"{prefix}worst_decile"] == table["accuracy"]["worst_decile"]
        for name in ("nll", "calibration_error", "macro_f1"):
            assert row[f"{prefix}{name}"] == table[name]["mean"]
    last = jobs[0].run.read_metrics()[-1]
    assert row["validation_worst_decile"] == last["validation_worst_decile"]
    told = summarize([row], out)["one"]
    assert told["mean"] == row["accuracy"]
    assert told["worst_decile"]["seeds"] == [row["worst_decile"]]
    assert told["held_out_macro_f1"]["mean"] == row["held_out_macro_f1"]


def test_stages_are_changed_where_they_are(tmp_path: Path) -> None:
    study, stage = tmp_path / "study.toml", "[{server = {rounds = 1}}]"
    given = ["before.1.server.rounds=4"]

    def rounds(text: str, overrides: list[str]) -> list[int]:
        study.write_text(text)
        found = read_comparison(str(study), tmp_path / "runs", overrides)
        return [job.config.stages[0].server.rounds for job in found]

    assert rounds(f"before = {stage}\n{STUDY}", given) == [4]
    grid = "[compare.variants.one.grid]\n'before.1.server.rounds' = [1, 3]\n"
    assert rounds(f"{STUDY}before = {stage}\n{grid}", []) == [1, 3]
    with pytest.raises(ConfigError, match="--set cannot change the stages of variants"):
        rounds(f"{STUDY}before = {stage}\n", given)
    with pytest.raises(ConfigError, match="none comes before the last"):
        rounds(STUDY, given)


def test_a_variant_of_another_method_is_told_of_the_stages_that_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = tmp_path / "study.toml"
    stage = 'method.name = "flowdup"\nbefore = [{method = {name = "fedprox"}}]\n'
    study.write_text(f"{stage}{STUDY}[compare.variants.two]\nserver = {{rounds = 1}}\n")
    read_comparison(str(study), tmp_path / "runs")
    (told,) = caplog.messages
    assert told.startswith("method.name = 'fedavg' is the last stage alone, and 'fedprox' still")


def test_rows_of_old_and_new_results_can_be_read_by_their_common_names(
    done: tuple[list[Job], Path],
) -> None:
    new = set(collect(*done)[0])
    for path in sorted((ROOT / "results").glob("*.json")):
        for row in json.loads(path.read_text()):
            if "variant" in row:
                assert set(row) <= new


def test_a_metric_cannot_have_the_name_of_another_column(done: tuple[list[Job], Path]) -> None:
    """Else a column of results.json or summary.json would silently be another's."""
    jobs, out = done
    columns = set(collect(jobs, out)[0]) | set(summarize(collect(jobs, out), out)["one"])
    own = {f"{prefix}{name}" for name in METRICS for prefix in ("", "held_out_")}
    for name in (columns - own) | {"held_out_nll"}:
        flowdup.register_metric(name, accuracy)
        try:
            with pytest.raises(ConfigError, match=f"cannot be named '{name}'"):
                read_comparison(str(out / "study.toml"), out)
        finally:
            METRICS.unregister(name)


def test_an_evaluation_of_an_older_kind_is_refused_with_a_remedy(
    done: tuple[list[Job], Path],
) -> None:
    jobs, out = done
    path = jobs[0].run.evaluation
    whole = path.read_text()
    path.write_text(json.dumps({"accuracy": {"transductive": 50.0}}))
    try:
        with pytest.raises(CheckpointError, match="flowdup evaluate"):
            collect(jobs, out)
    finally:
        path.write_text(whole)


def test_a_row_does_without_metrics_that_were_lost(done: tuple[list[Job], Path]) -> None:
    jobs, out = done
    whole = jobs[0].run.metrics.read_text()
    for lines in ('{"round": 2}\n', ""):
        jobs[0].run.metrics.write_text(lines)
        try:
            (row,) = collect(jobs, out)
        finally:
            jobs[0].run.metrics.write_text(whole)
        assert row["seconds"] is None and row["accuracy"] is not None


def comparison(folder: Path, seeds: str, *variants: str) -> list[Job]:
    head = STUDY.partition("[compare]")[0]
    tables = "".join(f"[compare.variants.{variant}]\n" for variant in variants)
    (folder / "study.toml").write_text(f"{head}[compare]\nseeds = {seeds}\n{tables}")
    return read_comparison(str(folder / "study.toml"), folder / "out")


def test_a_seed_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a seed twice in \[0, 1, 0\]"):
        comparison(tmp_path, "[0, 1, 0]", "one")


@pytest.mark.parametrize("name", ["'../x'", "'/abs'", "'a/../../x'", "''", "'.'", r'"a\u0000b"'])
def test_a_variant_does_not_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no folder inside"):
        comparison(tmp_path, "[0]", name)


@pytest.mark.parametrize(
    "names",
    [
        ["a", "'a/'"],
        ["a", "'./a'"],
        ["a", "'a/seed-1'"],
        ["'a/seed-1/b'", "a"],
        ["link", "real"],
        ["'results.json'"],
        ["'comparison.html'"],
        ["'summary.json/a'"],
        ["a.grid]\n'server.cohort' = [2, 2]\n[compare.variants.b"],
    ],
)
def test_two_runs_do_not_share_a_folder(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "out" / "real").mkdir(parents=True)
    (tmp_path / "out" / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="would share a folder with"):
        comparison(tmp_path, "[0, 1]", *names)


def test_variants_may_lie_in_one_folder_beside_each_other(tmp_path: Path) -> None:
    jobs = comparison(tmp_path, "[0, 1]", "a", "'a/b'", "'a/seed-2'", "c")
    assert len({job.run.path for job in jobs}) == 8


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


def test_validation_accuracy_is_that_of_the_round_that_is_kept(
    done: tuple[list[Job], Path],
) -> None:
    jobs, out = done
    run = jobs[0].run
    whole = run.metrics.read_text()
    rows = [
        row | {"validation_accuracy": 10.0 * row["round"], "validation_worst_decile": row["round"]}
        for row in (json.loads(line) for line in whole.splitlines())
    ]
    kept = run.read_evaluation()["round"]
    later = [*rows, rows[-1] | {"round": 3, "validation_accuracy": 1.0}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in later))
    try:
        (row,) = collect(jobs, out)
    finally:
        run.metrics.write_text(whole)
    assert row["validation"] == 10.0 * kept and row["validation_worst_decile"] == kept
