"""A run goes on, and is evaluated, with the clients that it was started with or not at all."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flowdup import Config, evaluate_run, read_config, train_run
from flowdup.errors import DataError


def write_client(path: Path, points: int = 6) -> None:
    draw = np.random.default_rng(len(path.stem))
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=draw.normal(size=(points, 3)).astype("f4"), y=np.arange(points) % 2)


def settings(data: Path, rounds: int) -> Config:
    table = {
        "model": "mlp",
        "method": {"name": "fedavg"},
        "data": {"source": "folder", "path": str(data)},
        "server": {"rounds": rounds, "cohort": 2},
        "engine": {"device": "cpu"},
    }
    return read_config(table)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for group, number in (("train", 3), ("validation", 1), ("test", 2)):
        for i in range(number):
            write_client(tmp_path / "data" / group / f"{group}-{i}.npz")
    return tmp_path / "data"


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Path:
    list(train_run(settings(data, 1), tmp_path / "run"))
    return tmp_path / "run"


def another_name(data: Path) -> None:
    (data / "train" / "train-0.npz").rename(data / "train" / "somebody.npz")


def one_more(data: Path) -> None:
    write_client(data / "train" / "late.npz")


def fewer_points(data: Path) -> None:
    write_client(data / "test" / "test-1.npz", points=4)


def no_label(data: Path) -> None:
    path = data / "train" / "train-1.npz"
    np.savez(path, x=np.load(path)["x"])


CHANGES = (another_name, one_more, fewer_points, no_label)
changed = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


def contents(folder: Path) -> dict[str, bytes]:
    names = ("config.toml", "clients.json", "metrics.jsonl", "checkpoint/checkpoint.json")
    return {name: (folder / name).read_bytes() for name in names}


@changed
def test_a_run_does_not_go_on_with_other_clients(
    change: Callable[[Path], None], run: Path, data: Path
) -> None:
    before = contents(run)
    change(data)
    with pytest.raises(DataError, match="client"):
        list(train_run(settings(data, 2), run, resume=True))
    assert contents(run) == before


@changed
def test_a_run_is_not_evaluated_on_other_clients(
    change: Callable[[Path], None], run: Path, data: Path
) -> None:
    change(data)
    with pytest.raises(DataError, match="client"):
        evaluate_run(run)
    assert not (run / "evaluation.json").exists()


def test_the_same_clients_go_on_and_are_evaluated(run: Path, data: Path) -> None:
    assert [metrics["round"] for metrics in train_run(settings(data, 2), run, resume=True)] == [2]
    assert len(evaluate_run(run)["clients"]) == 2


def test_metrics_of_a_continued_run_have_every_round_once(run: Path, data: Path) -> None:
    list(train_run(settings(data, 3), run, resume=True))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]
