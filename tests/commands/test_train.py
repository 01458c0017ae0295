"""What `flowdup train` says: before the first round, instead of a bar, and when nothing is left."""

import json
import re
import sys
from pathlib import Path

import pytest
from commands.here import flowdup, flowdup_on_terminal

from flowdup import progress
from flowdup.version import __version__

SMALL = (
    "digits",
    "--set=server.rounds=2",
    "--set=server.cohort=2",
    "--set=data.train_clients=4",
    "--set=data.validation_clients=2",
    "--set=data.test_clients=2",
    "--set=method.subspace.k=20",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    assert flowdup("train", *SMALL, "--out", out).code == 0
    return out


def test_a_terminal_is_told_what_goes_on_before_the_first_round(tmp_path: Path) -> None:
    stage = '--set=before=[{method={name="fedavg"}, server={rounds=1}}]'
    ended = flowdup_on_terminal("train", *SMALL, stage, "--out", tmp_path / "run")
    assert ended.code == 0
    phases = ["loading the clients of 'digits'", "building the model 'mlp'", "the first round"]
    places = [ended.error.find(text) for text in (*phases, "3/3")]  # one bar over all stages
    assert -1 not in places and places == sorted(places)
    assert "0/3" not in ended.error  # no empty bar
    assert ended.out.startswith("run folder")


def test_an_error_comes_before_any_bar(tmp_path: Path) -> None:
    ended = flowdup_on_terminal(
        "train", *SMALL, "--set=data.points=5000", "--out", tmp_path / "run"
    )
    assert ended.code == 2 and "error:" in ended.error and "loading the clients" in ended.error
    assert "rounds/s" not in ended.error and ended.out == ""


def test_what_is_no_terminal_is_told_now_and_then_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SECONDS", float("inf"))
    ended = flowdup("train", *SMALL, "--out", tmp_path / "soon done")
    assert (ended.code, ended.error) == (0, "") and "rounds/s" not in ended.out
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    ended = flowdup("train", *SMALL, "--out", tmp_path / "run")
    first, last = ended.error.splitlines()
    assert re.fullmatch(r"round 1 of 2: loss \d\.\d+, validation -, - rounds/s", first)
    assert re.fullmatch(r"round 2 of 2: loss \d\.\d+, validation [\d.]+ %, [\d.]+ rounds/s", last)
    assert "rounds/s" not in ended.out
    assert flowdup("train", *SMALL, "--out", tmp_path / "json", "--json").error == ""


def test_resuming_a_finished_run_says_so_and_changes_nothing(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    ended = flowdup("train", "--resume", "--out", run)
    assert (ended.code, ended.error) == (0, "")
    assert f"{run} is finished, after round 2: nothing was left to train\n" in ended.out
    machine = flowdup("train", "--resume", "--out", run, "--json")
    assert machine.out == "" and "is finished, after round 2" in machine.error
    assert (run / "metrics.jsonl").read_bytes() == before


def test_results_and_reports_name_the_version(run: Path) -> None:
    assert f"Page by flowdup {__version__}" in (run / "report.html").read_text()
    assert flowdup("evaluate", run).code == 0
    versions = json.loads((run / "evaluation.json").read_text())["versions"]
    assert versions["flowdup"] == __version__
    told = f"Evaluated with flowdup {__version__}, python {versions['python']}, torch "
    assert told in (run / "report.html").read_text()


def test_tensorboard_that_is_not_installed_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not there
    log = '--set=run.log=["tensorboard"]'
    ended = flowdup("train", *SMALL, log, "--out", tmp_path / "run")
    assert ended.code == 2 and "pip install 'flowdup[tensorboard]'" in ended.error
    assert not (tmp_path / "run").exists()
    ended = flowdup("train", *SMALL, '--set=run.log=["wandb"]', "--out", tmp_path / "run")
    assert ended.code == 2 and "run.log can name 'tensorboard', not 'wandb'" in ended.error


def test_tensorboard_reads_every_round_once_after_a_resume(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out, log = tmp_path / "run", '--set=run.log=["tensorboard"]'
    rounds = "--set=server.lr_decay_fraction=0.0"
    assert flowdup("train", *SMALL, log, rounds, "--out", out).code == 0
    assert flowdup("train", "--resume", "--set=server.rounds=4", "--out", out).code == 0
    accumulator = events.EventAccumulator(str(out / "tensorboard"))
    accumulator.Reload()
    told = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = [(e.step, e.value) for e in accumulator.Scalars("loss")]
    assert found == [(row["round"], pytest.approx(row["loss"], rel=1e-6)) for row in told]
    assert len(found) == 4 and "validation_accuracy" in accumulator.Tags()["scalars"]
