"""A run folder: one place knows its files."""

import json
import re
import warnings
from pathlib import Path

import pytest

import flowdup as package
from flowdup import read_config
from flowdup.errors import CheckpointError, FlowdupError
from flowdup.run import RunFolder

SOURCES = Path(package.__file__).parent


def rows(*rounds: int) -> str:
    return "".join(
        json.dumps({"round": r, "loss": 1 / r, "seconds": 2.5 * r}) + "\n" for r in rounds
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "config.toml",
        "clients.json",
        "metrics.jsonl",
        "evaluation.json",
        "report.html",
        "embedding",
        "lock",
        "results.json",
        "summary.json",
    ],
)
def test_a_files_name_is_written_once_in_the_code(name: str) -> None:
    literal = re.compile(rf"""/ ["']{re.escape(name)}["']""")
    found = [p for p in SOURCES.rglob("*.py") if literal.search(p.read_text())]
    assert found == [SOURCES / "run" / "folder.py"]


def test_only_campaigns_federations_and_the_command_line_stand_above_runs() -> None:
    above = [SOURCES / name for name in ("__init__.py", "cli.py", "progress.py")]
    importing = re.compile(r"^\s*(from|import) flowdup\.run\b", re.MULTILINE)
    found = [p for p in SOURCES.rglob("*.py") if importing.search(p.read_text())]
    rooms = ("run", "campaign", "commands", "federation")
    assert sorted(p for p in found if p.parent.name not in rooms) == above


def test_a_configuration_reads_back_as_it_was(folder: RunFolder) -> None:
    config = read_config({"seed": 7, "method": {"name": "fedavg"}})
    folder.write_config(config)
    assert folder.read_config() == config


def test_a_folder_without_a_configuration_is_not_a_run_folder(folder: RunFolder) -> None:
    with pytest.raises(CheckpointError, match=r"not a run folder: it has no config\.toml"):
        folder.read_config()


def test_metrics_after_a_round_are_dropped_with_an_unfinished_line(folder: RunFolder) -> None:
    folder.metrics.write_text(rows(1, 2, 3, 4) + '{"round": 5, "lo')
    assert folder.cut_metrics(3) == 7.5
    assert folder.metrics.read_text() == rows(1, 2, 3)
    folder.append_metrics({"round": 4})
    assert [row["round"] for row in folder.read_metrics()] == [1, 2, 3, 4]
    assert folder.count_rounds() == 4


def test_a_run_that_has_not_begun_has_no_metrics_and_no_evaluation(folder: RunFolder) -> None:
    assert folder.read_metrics() == [] and folder.count_rounds() == 0
    assert folder.read_evaluation() == {} and not folder.started
    assert folder.cut_metrics(0) == 0.0


def test_lost_rounds_are_named_and_the_others_stay(folder: RunFolder) -> None:
    folder.metrics.write_text(rows(1, 2, 5, 8) + '{"round": 9, "loss": 1, "round": 1')
    with pytest.warns(UserWarning, match="lost the metrics of rounds 3 to 4, 6 to 7, 9, which"):
        assert folder.cut_metrics(9) == 20.0
    assert folder.metrics.read_text() == rows(1, 2, 5, 8)


def test_of_very_many_gaps_the_first_are_named_and_the_others_counted(folder: RunFolder) -> None:
    folder.metrics.write_text(rows(*range(2, 101, 2)))
    with pytest.warns(UserWarning, match=r"rounds 1, 3, .*, 39, and 31 more gaps, which") as found:
        folder.cut_metrics(102)
    assert len(str(found[0].message)) < 500 + len(str(folder.path))


def test_a_whole_file_of_metrics_is_not_complained_of(folder: RunFolder) -> None:
    folder.metrics.write_text(rows(1, 2, 3, 4))
    with warnings.catch_warnings(action="error"):
        folder.cut_metrics(3)


@pytest.mark.parametrize("seconds", ["", ', "seconds": null', ', "seconds": "x"'])
def test_seconds_that_are_missing_are_taken_from_the_round_before(
    folder: RunFolder, seconds: str
) -> None:
    folder.metrics.write_text(rows(1) + f'{{"round": 2, "loss": 1.0{seconds}}}\n')
    assert folder.cut_metrics(2) == 2.5


@pytest.mark.parametrize(
    "line", ["{}", "[" * 100_000, '{"round": true}', '{"round": 0}', '{"round": 1e3}', "\0\0"]
)
def test_a_line_that_is_no_rounds_metrics_is_named(folder: RunFolder, line: str) -> None:
    folder.metrics.write_text(rows(1) + line + "\n" + rows(3))
    with pytest.raises(CheckpointError, match="line 2 of"):
        folder.read_metrics()


@pytest.mark.parametrize("line", ["{}", '{"round": 0}', '{"round": 1e3}', f'{{"round": {2**62}}}'])
def test_a_report_counts_the_same_lines_as_a_resumed_run(folder: RunFolder, line: str) -> None:
    folder.metrics.write_text(rows(1) + "\n" + line + "\n" + rows(2))  # a blank line is a line
    with pytest.raises(CheckpointError, match="line 3 of"):
        folder.read_metrics()
    found = folder.read_all()
    assert found.problems == ("metrics.jsonl has 1 unreadable lines (3): restore it",)
    assert [row["round"] for row in found.metrics] == [1, 2]


def test_a_broken_line_of_metrics_is_named_and_not_dropped(folder: RunFolder) -> None:
    content = rows(1) + "{}\n" + rows(3)
    folder.metrics.write_text(content)
    with pytest.raises(CheckpointError, match="line 2 of"):
        folder.cut_metrics(3)
    assert folder.metrics.read_text() == content


def test_what_cannot_be_appended_is_an_error_for_a_person(tmp_path: Path) -> None:
    with pytest.raises(FlowdupError, match="could not write"):
        RunFolder(tmp_path / "nowhere").append_metrics({"round": 1})
