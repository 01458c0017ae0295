"""A run goes on as itself: settings, clients' data and checkpoint are those it was started with."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import METHODS, SPEC, population

from flowdup import ClientData, Population, evaluate_run, load, read_config, train_run
from flowdup.checkpoint import save_checkpoint
from flowdup.config import Config
from flowdup.errors import CheckpointError, ConfigError, DataError
from flowdup.run import RunFolder, Simulation
from flowdup.run.origin import check_settings, stored_config, with_given_clients

TABLE = {
    "model": "mlp",
    "method": METHODS["fedavg"],
    "server": {"rounds": 2, "cohort": 2},
    "run": {"checkpoint_every": 1},
}
LATER = dict(TABLE, server={"rounds": 3, "cohort": 2})


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """One that has ended."""
    list(train_run(read_config(TABLE), tmp_path / "run", population=population()))
    return RunFolder(tmp_path / "run")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Clients of one's own."""
    folder = tmp_path / "clients"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for i in range(9):
        x = draw.normal(size=(10, 4)).astype(np.float32)
        np.savez(folder / f"a{i}.npz", x=x, y=draw.integers(0, 3, 10), site="north")
    return folder


def of_files(path: str | Path, rounds: int = 2) -> Config:
    data = {"source": "folder", "path": str(path), "validation_clients": 2, "test_clients": 2}
    server = {"rounds": rounds, "cohort": 2}
    return read_config(TABLE | {"data": data | {"classes": 3}, "server": server})


def test_a_run_begins_with_the_checkpoint_of_round_0(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="asked"):
        list(train_run(read_config(TABLE), tmp_path, population=population(), stop=_raise))
    assert load(tmp_path).round == 0
    assert RunFolder(tmp_path).read_metrics() == []


def _raise() -> bool:
    raise RuntimeError("asked")


@pytest.mark.parametrize("key", ["seed", "cohort", "batch_size"])
def test_an_edited_setting_is_named_with_both_values(run: RunFolder, key: str) -> None:
    text = run.config.read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{key} = "))
    value = line.partition(" = ")[2]
    run.config.write_text(text.replace(line, f"{key} = 77"))
    for work in (lambda: stored_config(run), lambda: evaluate_run(run.path, population())):
        with pytest.raises(ConfigError, match=rf"{key} is 77 in config.toml and {value} in the"):
            work()


def test_a_run_may_go_on_elsewhere_and_longer(run: RunFolder) -> None:
    text = run.config.read_text()
    text = text.replace("evaluate_every = 50", "evaluate_every = 1")
    text = text.replace('name = "auto"', 'name = "sequential"').replace("rounds = 2", "rounds = 3")
    run.config.write_text(text)
    config = stored_config(run)
    assert (config.run.evaluate_every, config.engine.name) == (1, "sequential")
    rounds = [m["round"] for m in train_run(config, run.path, True, population())]
    assert rounds == [3]


CORRECTED = TABLE | {"method": {"name": "fedavg", "correction": "em"}}
STAGED = TABLE | {"before": [{"server": {"rounds": 1}}]}


@pytest.mark.parametrize(
    ("table", "refused"),
    [
        (TABLE, set()),
        (CORRECTED, {"run.evaluate_every"}),
        (STAGED, {"run.evaluate_every", "run.keep", "run.patience"}),
    ],
    ids=["plain", "corrected", "staged"],
)
def test_what_evaluations_decide_stays_where_training_hangs_on_it(
    table: dict[str, Any], refused: set[str], tmp_path: Path
) -> None:
    """A correction is what a teacher may know; a stage begins from the best round before it."""
    list(train_run(read_config(table), tmp_path, population=population()))
    changes = {
        "run.evaluate_every": 1,
        "run.keep": "last",
        "run.patience": 7,
        "run.checkpoint_every": 2,
        "run.false_alarms": 0.0,
        "server.rounds": 3,
    }
    for key, value in changes.items():
        part, _, name = key.partition(".")
        other = read_config(table | {part: table[part] | {name: value}})
        if key in refused:
            with pytest.raises(ConfigError, match=f"{key} is .* in the checkpoint"):
                check_settings(RunFolder(tmp_path), with_given_clients(other))
        else:
            check_settings(RunFolder(tmp_path), with_given_clients(other))


def test_settings_are_in_the_checkpoint_if_config_toml_is_lost(run: RunFolder) -> None:
    whole = run.config.read_text(), run.clients.read_text()
    run.config.unlink()
    run.clients.unlink()
    assert list(train_run(stored_config(run), run.path, True, population())) == []
    assert (run.config.read_text(), run.clients.read_text()) == whole


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_lost_its_checkpoint_is_not_started_over(run: RunFolder, resume: bool) -> None:
    (run.checkpoint / "checkpoint.json").unlink()
    kept = ("metrics.jsonl", "clients.json", "config.toml")
    for name in (*kept, "checkpoint", "best"):
        left = {p.name: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
        with pytest.raises(CheckpointError, match="but no whole checkpoint: restore"):
            next(train_run(read_config(TABLE), run.path, resume, population()))
        assert {p.name: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == left
        for path in [run.path / name] if name in kept else (run.path / name).glob("*"):
            path.unlink()
    assert len(list(train_run(read_config(TABLE), run.path, resume, population()))) == 2


def test_fewer_rounds_than_were_trained_are_refused(run: RunFolder) -> None:
    fewer = read_config(dict(TABLE, server={"rounds": 1, "cohort": 2}))
    before = run.metrics.read_text()
    with pytest.raises(ConfigError, match=r"trained for 2 rounds and server\.rounds is 1"):
        next(train_run(fewer, run.path, True, population()))
    assert run.metrics.read_text() == before


def _flip(client: ClientData) -> ClientData:
    x = client.x.clone()
    x.view(-1)[-1] ^= 1
    return ClientData(x, client.y, client.name, client.traits)


def _relabel(client: ClientData) -> ClientData:
    assert client.y is not None
    return ClientData(client.x, client.y.flip(0), client.name, client.traits)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_flip, r"client 'client-10': its data differ"),
        (_relabel, r"client 'client-10': its data differ"),
        (lambda c: ClientData(c.x, c.y, "z", c.traits), r"client 'z' was 'client-10'"),
        (lambda c: ClientData(c.x, c.y, c.name), r"client 'client-10': its traits"),
    ],
)
def test_the_first_client_that_differs_is_named(
    run: RunFolder, change: Callable[[ClientData], ClientData], told: str
) -> None:
    ours = population()
    validation = [change(c) if i == 2 else c for i, c in enumerate(ours.validation)]
    other = Population(SPEC, ours.train, validation, ours.test)
    with pytest.raises(DataError, match=told):
        next(train_run(read_config(LATER), run.path, True, other))
    with pytest.raises(DataError, match="there are 7 train clients and were 8"):
        fewer = Population(SPEC, ours.train[:-1], ours.validation, ours.test)
        next(train_run(read_config(LATER), run.path, True, fewer))
    run.clients.write_text("{}")
    with pytest.raises(DataError, match=r"clients\.json is not as it was"):
        next(train_run(read_config(LATER), run.path, True, other))
    assert len(list(train_run(read_config(LATER), run.path, True, population()))) == 1


def test_other_contents_in_ones_own_files_are_found(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    list(train_run(of_files(files), out))
    stored = dict(np.load(files / "a7.npz"))
    stored["x"][0, 0] += 1e-6
    np.savez(files / "a7.npz", **stored)
    with pytest.raises(DataError, match="client 'a7': its data differ"):
        next(train_run(of_files(files, 3), out, resume=True))
    with pytest.raises(DataError, match="client 'a7': its data differ"):
        evaluate_run(out)


def test_a_relative_path_of_clients_holds_from_any_folder(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    list(train_run(of_files("clients"), out))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert evaluate_run(out)["round"] == 2
    config = stored_config(RunFolder(out), ["server.rounds=3"])
    assert len(list(train_run(config, out, resume=True))) == 1
    files.rename(tmp_path / "moved")  # whose contents tell that they are the same
    assert len(list(train_run(of_files(tmp_path / "moved", 4), out, resume=True))) == 1


def test_a_digest_is_of_types_shapes_and_bytes() -> None:
    x, y = torch.arange(12, dtype=torch.uint8).reshape(3, 4), torch.tensor([0, 1, 2])
    digests = {
        ClientData(x, y).digest(),
        ClientData(x).digest(),
        ClientData(x.reshape(4, 3), y).digest(),
        ClientData(x.to(torch.int8), y).digest(),
        ClientData(x, y.flip(0)).digest(),
    }
    assert len(digests) == 5
    assert ClientData(x.t().contiguous().t(), y, "b", {"t": 1}).digest() in digests


def test_a_checkpoint_saved_outside_of_a_run_is_not_gone_on_with(run: RunFolder) -> None:
    config = read_config(TABLE)
    simulation = Simulation(config, population())
    save_checkpoint(run.checkpoint, simulation.federation, simulation.initial_state())
    with pytest.raises(CheckpointError, match="outside of a run: choose another folder"):
        next(train_run(config, run.path, True, population()))


def test_metrics_are_on_the_disk_before_the_checkpoint_of_their_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system is asked: what a power failure leaves cannot be seen from here."""
    synced, seen = dict[str, int](), list[tuple[int, int]]()
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    def watched_replace(source: Path, target: Path) -> None:
        if target.name == "checkpoint.json":
            header, metrics = json.loads(Path(source).read_text()), tmp_path / "metrics.jsonl"
            lines = metrics.read_bytes()[: synced.get(str(metrics), 0)] if metrics.exists() else b""
            seen.append((header["round"], lines.count(b"\n")))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    list(train_run(read_config(LATER), tmp_path, population=population()))
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3), (3, 3)]  # the last is also the best
