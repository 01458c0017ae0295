"""Campaigns in real processes: killed, continued, merged; a run gives what it gives alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import alive, until, workers
from typer.testing import CliRunner

from flowdup import evaluate_run, train_run
from flowdup.campaign import Records, Request, load_experiment, plan, reproduce, schedule
from flowdup.cli import app
from flowdup.errors import ConfigError, GpuMemoryError
from flowdup.methods import METHODS
from flowdup.registry import import_modules
from flowdup.run import RunFolder
from flowdup.run.lock import locked

TABLE = """
title = "Tiny"
preset = "digits"
seeds = [0, 1]
reference = "FLowDUP"
support = [1, 5]
embedding = { row = "FLowDUP", column = "all" }
[settings]
data = { points = 20, train_clients = 12, validation_clients = 8, test_clients = 4 }
server = { rounds = 8, cohort = 3 }
run = { evaluate_every = 8 }
engine = { name = "sequential", device = "cpu", compile = false }
[columns]
all = {}
[rows.FLowDUP]
settings = { method = { subspace = { k = 50 } } }
search = { "client.optimizer.lr" = [0.03, 1e30] }
paper = [[66.1, 1.5]]
[rows.FedAvg]
settings = { method = { name = "fedavg" } }
search = { "client.optimizer.lr" = [0.01, 0.1] }
"""
GREEDY = """
import torch
from flowdup.methods import register_method
from flowdup.methods.fedavg import FedAvg

class Greedy(FedAvg):
    def loss(self, params, batch, start):
        raise torch.OutOfMemoryError

register_method("greedy", Greedy)
"""
SPOILED = """
import os
from pathlib import Path
from flowdup.methods import register_method
from flowdup.methods.fedavg import FedAvg

Path(__file__).with_name(f"{os.getpid()}.pid").touch()

class Spoiled(FedAvg):
    def loss(self, params, batch, start):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

register_method("spoiled", Spoiled)
"""
# as where typer and rich are not installed
BARE = (
    "import runpy, sys; sys.modules.update(typer=None, rich=None); "
    "runpy.run_module('flowdup.campaign', run_name='__main__')"
)


def request(folder: Path, **changes: Any) -> Request:
    places = {"work": folder / "work", "records": folder / "runs.jsonl", "results": folder}
    return Request([str(folder / "tiny.toml")], **{"jobs": 2} | places | changes)


def told(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    return [event.data for event in reproduce(request(folder, **changes))]


def titles(events: list[dict[str, Any]]) -> list[str]:
    return [event["done"] for event in events if isinstance(event.get("done"), str)]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[str]]:
    """One that was killed after its first run and continued; what was done before and after."""
    folder = tmp_path_factory.mktemp("campaign")
    (folder / "tiny.toml").write_text(TABLE)
    options = ["--jobs=1", f"--work={folder}/work", f"--records={folder}/runs.jsonl"]
    command = [sys.executable, "-c", BARE, f"{folder}/tiny.toml", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        until((folder / "runs.jsonl").exists)
        at_work = workers(process.pid)
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        before = [line for line in process.stdout if "to go)" in line]
    until(lambda: not any(map(alive, at_work)))
    return folder, before, titles(told(folder))


def test_a_killed_campaign_goes_on_and_repeats_nothing(
    campaign: tuple[Path, list[str], list[str]],
) -> None:
    folder, before, after = campaign
    records = Records.read(folder / "runs.jsonl")
    assert len(records.by_digest) == 6  # two rows with two settings, and another seed of the best
    # 4 to choose and 4 of the chosen settings; what the first process saved is not done again
    assert 8 - len(before) - 1 <= len(after) < 8
    assert len(set(after)) == len(after)


def test_what_is_done_is_skipped(campaign: tuple[Path, list[str], list[str]]) -> None:
    folder, _, _ = campaign
    shutil.move(folder / "work", folder / "gone")  # records are enough
    old = (folder / "tiny.json").read_bytes()
    events = told(folder)
    shutil.move(folder / "gone", folder / "work")
    assert not titles(events)
    assert events[0]["done"] == events[0]["runs"] == 6
    assert (folder / "tiny.json").read_bytes() == old


def test_a_cell_has_what_its_runs_give_alone_and_nothing_of_settings_not_chosen(
    campaign: tuple[Path, list[str], list[str]], tmp_path: Path
) -> None:
    folder, _, _ = campaign
    table = json.loads((folder / "tiny.json").read_bytes())
    flowdup, fedavg = table["cells"]
    assert flowdup["searched"] == {"client.optimizer.lr": 0.03}
    assert "training diverged" in flowdup["tried"][1]["failed"]
    assert (flowdup["seeds"], flowdup["rounds"], flowdup["paper_mean"]) == ([0, 1], 8, 66.1)
    assert set(flowdup["support"]) == {"1", "5"}
    assert fedavg["difference"]["to"] == "FLowDUP"
    experiment = load_experiment(str(folder / "tiny.toml"))
    run = experiment.cells[0].candidates[0].runs[1]
    for _ in train_run(run.config, tmp_path / "alone"):
        pass
    alone = evaluate_run(tmp_path / "alone")["metrics"]
    assert flowdup["values"]["accuracy"][1] == alone["transductive"]["accuracy"]["mean"]
    assert flowdup["values"]["held_out"][1] == alone["held_out"]["accuracy"]["mean"]
    left = next(c for c in experiment.cells[1].candidates if c.searched != fedavg["searched"])
    records = Records.read(folder / "runs.jsonl")
    other = records.get(left.runs[0])
    assert other is not None and "validation" in other and "test" not in other
    assert records.get(left.runs[1]) is None
    assert not (folder / f"work/{left.runs[0].digest[:16]}/evaluation.json").exists()


def test_embeddings_travel_with_the_records_and_are_drawn_from_them(
    campaign: tuple[Path, list[str], list[str]],
) -> None:
    folder, _, _ = campaign
    records = Records.read(folder / "runs.jsonl").by_digest.values()
    found = [record["embedding"] for record in records if "embedding" in record]
    assert [len(embedding["vectors"]) for embedding in found] == [8]
    assert (folder / "tiny.png").exists()
    assert "silhouette" in json.loads((folder / "tiny.json").read_bytes())


def test_parts_that_were_run_apart_are_merged_into_the_same_table(
    campaign: tuple[Path, list[str], list[str]], tmp_path: Path
) -> None:
    folder, _, _ = campaign
    (tmp_path / "tiny.toml").write_text(TABLE)
    lines = (folder / "runs.jsonl").read_text().splitlines(keepends=True)
    parts = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    parts[0].write_text("".join(lines[:4]))
    parts[1].write_text("".join(lines[2:]))
    events = told(tmp_path, merge=parts[:1], run=False)
    assert events[0] == {"merged": 4}
    assert not titles(events)
    assert json.loads((tmp_path / "tiny.json").read_bytes())["cells"]
    events = told(tmp_path, merge=parts)
    assert events[0] == {"merged": 2}
    assert not titles(events)
    for name in ("runs.jsonl", "tiny.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def table_of_one_that_fails(method: str, engine: str = "sequential") -> str:
    text = TABLE[: TABLE.index("[rows.FLowDUP]")].replace("[0, 1]", "[0]").replace("[1, 5]", "[]")
    text = text.replace('embedding = { row = "FLowDUP", column = "all" }\n', "")
    text += f'[rows.wrong]\nsettings = {{ method = {method}, engine = {{ name = "{engine}" }} }}\n'
    return text + '[rows.FLowDUP]\nsettings = { method = { name = "fedavg" } }\n'


def test_a_run_that_fails_does_not_stop_the_others_and_is_told_in_the_end(tmp_path: Path) -> None:
    wrong = '{ name = "fedavg-tent", adapts = "norms" }'  # of a model that has none
    (tmp_path / "tiny.toml").write_text(table_of_one_that_fails(wrong))
    with pytest.raises(ConfigError, match="the model has no normalisation layer"):
        told(tmp_path)
    broken, whole = json.loads((tmp_path / "tiny.json").read_bytes())["cells"]
    assert (broken["seeds"], whole["seeds"]) == ([], [0])


def test_a_run_that_another_campaign_has_in_hand_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TABLE)
    runs = load_experiment(str(tmp_path / "tiny.toml"), rows="FedAvg").cells[0].candidates[0].runs
    with locked(RunFolder(tmp_path / "work" / runs[0].digest[:16])):
        events = told(tmp_path, rows="FedAvg", jobs=1)
    assert titles(events) == ["tiny: FedAvg, all, client.optimizer.lr = 0.1, seed 0"]
    assert events[-1] == {"left": 3}  # this one, and two seeds of what it will have decided
    assert len(titles(told(tmp_path, rows="FedAvg"))) == 3


def test_what_another_campaign_has_done_meanwhile_is_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TABLE)
    short_of_time = reproduce(request(tmp_path, rows="FedAvg", seconds=1e-6))
    next(short_of_time)  # it has read that no run is known
    told(tmp_path, rows="FedAvg")
    last = [*short_of_time][-1].data
    assert last == {"results": str(tmp_path / "tiny.json")}  # and not that runs are left
    cells = json.loads((tmp_path / "tiny.json").read_bytes())["cells"]
    assert next(cell for cell in cells if cell["row"] == "FedAvg")["seeds"] == [0, 1]


@contextmanager
def own_method(folder: Path, name: str, source: str) -> Iterator[list[str]]:
    """A method that a module of this text registers, here and in workers."""
    file = folder / f"{name}_{folder.name}.py"  # a module's name, so no other test's
    file.write_text(source)
    import_modules([str(file)])
    try:
        yield [str(file)]
    finally:
        METHODS.unregister(name)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_full_gpu_is_no_outcome_of_a_run(tmp_path: Path, engine: str) -> None:
    (tmp_path / "tiny.toml").write_text(table_of_one_that_fails('{ name = "greedy" }', engine))
    with (
        own_method(tmp_path, "greedy", GREEDY) as own,
        pytest.raises(GpuMemoryError, match="does not fit in the GPU's memory"),
    ):
        list(reproduce(request(tmp_path), modules=own))
    greedy, whole = json.loads((tmp_path / "tiny.json").read_bytes())["cells"]
    assert (greedy["failed"], greedy["seeds"], whole["seeds"]) == ({}, [], [0])


def test_after_an_error_that_nobody_foresaw_a_fresh_process_goes_on(tmp_path: Path) -> None:
    text = table_of_one_that_fails('{ name = "spoiled" }') + "seeds = [0, 1, 2]\n"
    (tmp_path / "tiny.toml").write_text(text)
    with (
        own_method(tmp_path, "spoiled", SPOILED) as own,
        pytest.raises(RuntimeError, match="illegal memory access"),
    ):
        list(reproduce(request(tmp_path), modules=own))
    spoiled, whole = json.loads((tmp_path / "tiny.json").read_bytes())["cells"]
    assert (spoiled["seeds"], whole["seeds"]) == ([], [0, 1, 2])
    began = {path.stem for path in tmp_path.glob("*.pid")} - {str(os.getpid())}
    assert len(began) == 3  # two, and one in the place of the spoiled one


def test_columns_alone_are_run_with_what_another_column_chooses(tmp_path: Path) -> None:
    half = "all = {}\nhalf = { data = { labeled_fraction = 0.5 } }\n[rows.FLowDUP]\n"
    text = TABLE.replace("all = {}\n[rows.FLowDUP]\n", half).replace("paper = [[66.1, 1.5]]", "")
    (tmp_path / "tiny.toml").write_text(f'search_column = "all"\n{text}')
    chosen = [f"tiny: FedAvg, all, client.optimizer.lr = {lr}, seed 0" for lr in (0.01, 0.1)]
    events = told(tmp_path, rows="FedAvg", columns="half", seeds=1)
    assert sorted(titles(events)[:2]) == chosen
    assert titles(events)[2:] == ["tiny: FedAvg, half, seed 0"]
    done = {c["column"]: c for c in json.loads((tmp_path / "tiny.json").read_bytes())["cells"][2:]}
    assert (done["half"]["seeds"], done["all"]["seeds"]) == ([0], [])
    best = max(done["half"]["tried"], key=lambda entry: entry["validation"])
    assert done["half"]["searched"] == best["settings"]


def test_rows_of_tables_are_run_together(tmp_path: Path) -> None:
    for name in ("tiny", "other"):
        (tmp_path / f"{name}.toml").write_text(TABLE.replace("points = 20", "points = 10"))
    asked = replace(
        request(tmp_path, seeds=1, dry_run=True),
        tables=[f"{tmp_path}/tiny.toml/FedAvg", f"{tmp_path}/other.toml"],
    )
    planned = [(event.data["table"], event.data["cells"]) for event in reproduce(asked)]
    assert planned == [("tiny", 1), ("other", 2)]
    for rows, clue in (("Fedavg", "did you mean 'FedAvg'"), ("FedAvg,all", "no row is .*'all'")):
        wrong = replace(asked, tables=[f"{tmp_path}/tiny.toml/{rows}"])
        with pytest.raises(ConfigError, match=clue):
            list(reproduce(wrong))


def test_runs_of_tables_store_nothing_to_tell_foreign_clients_by(tmp_path: Path) -> None:
    text = TABLE.replace("evaluate_every = 8", "evaluate_every = 8, false_alarms = 0.2")
    (tmp_path / "tiny.toml").write_text(text)
    told(tmp_path, rows="FLowDUP", seeds=1)
    assert not list(tmp_path.glob("work/*/*/familiarity.json"))
    run = load_experiment(str(tmp_path / "tiny.toml")).cells[0].candidates[0].runs[0]
    list(train_run(run.config, tmp_path / "alone"))
    assert list(tmp_path.glob("alone/*/familiarity.json"))


def test_nothing_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TABLE)
    events = told(tmp_path, seconds=1e-6, jobs=1)
    assert not titles(events)
    assert events[-1]["left"] == 8
    assert not (tmp_path / "runs.jsonl").exists()


def test_with_little_time_left_what_is_trained_is_evaluated_and_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.toml").write_text(TABLE)
    now = 0.0
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: now))
    done = []
    for event in reproduce(request(tmp_path, rows="FedAvg", seconds=1000.0, jobs=1)):
        done += titles([event.data])
        now = 999.999 if done else 0.0  # the second is in the queue by now
    assert len(done) == 3  # two settings, and test clients with the better one, but no second seed
    assert done[-1] == "tiny: FedAvg, all, seed 0"


def test_the_command_tells_its_plan_and_refuses_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TABLE)
    words = ["reproduce", str(tmp_path / "tiny.toml"), "--dry-run", "--seeds=1"]
    words += [f"--records={tmp_path}/runs.jsonl", "--rows=FedAvg"]
    done = CliRunner().invoke(app, words)
    assert done.output == "tiny: 1 cells, 0 of 2 runs are done, and 1 once settings are chosen\n"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]
    for word, clue in (
        ("--set=server.rounds=2", "only engine.KEY=VALUE"),
        ("--rows=Fedavg", "did you mean 'FedAvg'"),
        (f"{tmp_path}/tiny.toml/FedAvg", "as TABLE/ROW or with --rows, not both"),
        ("--columns=al", "no column is called 'al' (did you mean 'all'?)"),
        ("--merge=nothing.jsonl", "there is no file nothing.jsonl"),
    ):
        assert clue in str(CliRunner().invoke(app, [*words, word]).exception)
    missing = CliRunner().invoke(app, ["reproduce", "paper-cifar10-cmn"])
    assert "did you mean 'paper-cifar10-cnn'" in str(missing.exception)


def test_device_and_precision_change_no_plan(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TABLE)
    name = str(tmp_path / "tiny.toml")
    there = load_experiment(name, ["engine.device=cuda", "engine.precision=bf16"])
    assert there.cells[0].candidates[0].runs[0].config.engine.precision == "bf16"
    nothing = Records(Path("nothing"))
    assert set(plan([there], nothing).known) == set(plan([load_experiment(name)], nothing).known)
