"""A run whose clients were given in Python says so, and knows them again."""

from pathlib import Path

import pytest
import small
from commands.here import flowdup

from flowdup.config import Config, read_config
from flowdup.errors import ConfigError, DataError
from flowdup.run import RunFolder, evaluate_run, train_run
from flowdup.run.origin import check_settings, with_given_clients


def config(rounds: int = 1) -> Config:
    return read_config(
        {
            "model": "mlp",
            "method": {"name": "fedavg"},
            "data": {"path": "/somewhere"},
            "server": {"rounds": rounds, "cohort": 2},
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("given") / "run"
    list(train_run(config(), out, population=small.population()))
    return out


def test_its_folder_and_its_report_say_so(run: Path) -> None:
    text = (run / "config.toml").read_text()
    assert 'source = "memory"' in text and "digits" not in text and "/somewhere" not in text
    report = (run / "report.html").read_text()
    assert "fedavg on clients given in Python" in report and "digits" not in report


def test_evaluating_it_from_the_command_line_is_answered_with_a_sentence(run: Path) -> None:
    for command in (("evaluate", run), ("train", "--resume", "--out", run)):
        ended = flowdup(*command)
        assert ended.code == 2 and ended.error.count("\n") == 1
        assert "were given in Python" in ended.error and "flowdup.evaluate_run" in ended.error


def test_with_the_same_clients_it_is_evaluated_and_goes_on(run: Path) -> None:
    assert len(evaluate_run(run, small.population())["clients"]) == 8
    more = [m["round"] for m in train_run(config(2), run, True, small.population())]
    assert more == [2]
    others = small.population()
    others.train[0].x[0, 0, 0, 0] ^= 1
    with pytest.raises(DataError, match="'client-0': its data differ"):
        list(train_run(config(3), run, True, others))


def test_an_older_run_that_claims_another_source_may_go_on(tmp_path: Path) -> None:
    """By its settings; whether the clients are the same, their digests tell."""
    data = {"points": 20, "train_clients": 4, "validation_clients": 2, "test_clients": 2}
    table = {"model": "mlp", "method": {"name": "fedavg"}, "server": {"rounds": 1, "cohort": 2}}
    list(train_run(read_config(table | {"data": data}), tmp_path / "old"))
    folder = RunFolder(tmp_path / "old")
    check_settings(folder, with_given_clients(config()))
    with pytest.raises(ConfigError, match=r"data\."):
        check_settings(folder, config())
