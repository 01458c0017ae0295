"""The tables of README.md and docs/ say what the result files say."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import record

from flowdup.campaign import Records, load_experiment, write_results

ROOT = Path(__file__).parents[1]


def tables(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "docs/tables", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def change(file: Path, edit: Callable[[list[dict[str, Any]]], object]) -> None:
    rows = json.loads(file.read_bytes())
    edit(rows)
    file.write_text(json.dumps(rows))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What tables are made of and stand in, without the rest of the repository."""
    for folder in ("results", "benchmarks/results", "experiments", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_no_table_is_stale() -> None:
    done = tables("--check")
    assert not done.returncode, done.stdout + done.stderr


def test_another_result_makes_a_table_stale_until_it_is_written_anew(copy: Path) -> None:
    change(copy / "results/demo.json", lambda rows: rows[0].update(accuracy=12.3))
    stale = tables("--check", "--root", copy)
    assert stale.returncode
    assert "stale tables in index.md: run `make tables`" in stale.stderr
    assert not tables("--root", copy).returncode
    assert not tables("--check", "--root", copy).returncode


def test_a_figure_changed_by_hand_is_noticed(copy: Path) -> None:
    page = copy / "docs/howto/choose-a-method.md"
    page.write_text(page.read_text().replace("| 93.", "| 39.", 1))
    assert "stale tables in choose-a-method.md" in tables("--check", "--root", copy).stderr


@pytest.mark.parametrize(
    ("text", "clue"),
    [
        ("<!-- table: demmo -->\n<!-- end -->\n", "no table is called 'demmo'"),
        ("<!-- table: demo -->\n", "no '<!-- end -->'"),
    ],
)
def test_a_table_that_is_unknown_or_does_not_end_is_refused(
    copy: Path, text: str, clue: str
) -> None:
    (copy / "docs/new.md").write_text(text)
    done = tables("--root", copy)
    assert done.returncode
    assert clue in done.stderr


def test_keys_may_be_added_to_results_and_may_be_missing(copy: Path) -> None:
    for folder in ("results", "benchmarks/results"):
        for file in (copy / folder).glob("*.json"):
            if isinstance(json.loads(file.read_bytes()), list):
                change(file, lambda rows: [row.update(brand_new=[1]) for row in rows])
    assert not tables("--check", "--root", copy).returncode

    def forget(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            for key in ("bytes_up", "held_out", "first_round_s", "quartiles", "commit"):
                row.pop(key, None)

    for name in ("results/precision.json", "benchmarks/results/gpu.json"):
        change(copy / name, forget)
    deciles = copy / "results/subspace-kinds.json"
    change(deciles, lambda rows: [row.update(worst_decile=9.9) for row in rows])
    done = tables("--root", copy)
    assert not done.returncode, done.stderr
    assert "| worst decile |" in (copy / "docs/findings.md").read_text()


def test_a_reproduced_table_stands_beside_the_papers_and_can_be_stale(copy: Path) -> None:
    table = load_experiment(str(copy / "experiments/paper-unlabeled-cnn.toml"))
    records = Records(copy / "results/runs.jsonl")
    for cell, better in zip(table.cells, range(8), strict=True):
        for candidate in table.decider(cell).candidates:
            records.add(record(candidate.runs[0].config, 50.0))
        for seed in (0, 1):
            config = cell.candidates[0].runs[seed].config
            records.add(record(config, 50.0, 60.0 + better + seed))
    file = write_results(table, records, copy / "results")
    assert "stale tables in reproduction.md" in tables("--check", "--root", copy).stderr
    assert not tables("--root", copy).returncode
    text = (copy / "docs/reproduction.md").read_text()
    assert "| without unlabeled | 60.5 ± 0.7 | 61.5 ± 0.7 | 62.5 ± 0.7 | 63.5 ± 0.7 |" in text
    assert "| *paper* | 51.5 ± 1.8 | 65.3 ± 1.3 | 74.5 ± 1.3 | 82.5 ± 1.0 |" in text
    assert "| 52.3 ± 1.4 | +4.0 (0.0) | 2 |" in text  # of the paper, difference, seeds
    assert not tables("--check", "--root", copy).returncode
    found = json.loads(file.read_bytes())
    found["cells"][0]["values"]["accuracy"][0] = 12.3
    file.write_text(json.dumps(found))
    assert tables("--check", "--root", copy).returncode


def cell(table: dict[str, Any], row: str, column: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        c for c in table["cells"] if (c["row"], c["column"]) == (row, column)
    )
    return found


def test_the_nearest_method_is_the_one_ahead_of_all_others_with_the_same_seeds(copy: Path) -> None:
    file = copy / "results/paper-femnist.json"
    table = json.loads(file.read_bytes())
    for found in table["cells"]:
        found.pop("difference", None)
    no_seed_in_common = None
    rows = {"FLowDUP": -2.0, "FedAvg": 0.14, "FedAvg + calibrated EM": no_seed_in_common}
    for row, ahead in rows.items():
        gap = {"mean": ahead, "standard_error": 0.2}
        cell(table, row, "p = 0.1").update(
            values={key: [80.0, 82.0] for key in ("accuracy", "held_out", "worst_decile")},
            difference={"accuracy": gap, "held_out": gap},
        )
    cell(table, "FLowDUP", "p = 0.2")["values"]["accuracy"] = [1.0]
    file.write_text(json.dumps(table))
    assert not tables("--root", copy).returncode
    scores = "| 81.0 ± 1.4, FedAvg | -0.14 (0.20) | -0.14 (0.20) | 2 of 16 | 81.0 ± 1.4 |"
    page = (copy / "docs/reproduction.md").read_text()
    for text in ((copy / "README.md").read_text(), page):
        assert scores in text
    assert "| FEMNIST, CNN | 3 of 3 | 1 | FLowDUP, p = 0.1: 3.1; FLowDUP, p = 0.2: 85.1 |" in page


def test_clients_of_a_single_point_have_no_other_half(copy: Path) -> None:
    file = copy / "results/paper-femnist.json"
    table = json.loads(file.read_bytes())
    for found in table["cells"]:
        found["values"]["held_out"] = [None for _ in found["seeds"]]
        if "difference" in found:
            found["difference"]["held_out"] = {"mean": None, "standard_error": None}
    file.write_text(json.dumps(table))
    done = tables("--root", copy)
    assert not done.returncode, done.stderr
    [line] = [t for t in (copy / "README.md").read_text().splitlines() if "| FEMNIST, p = 0.1" in t]
    assert line.split("|")[5].strip() == ""


def test_rows_and_tables_that_have_not_run_are_named(copy: Path) -> None:
    file = copy / "results/paper-femnist.json"
    table = json.loads(file.read_bytes())
    for found in table["cells"]:
        if found["row"] == "LAME":
            found.update(mean=None, values={key: [] for key in found["values"]}, seeds=[])
    file.write_text(json.dumps(table))
    (copy / "results/question-points.json").unlink()
    assert not tables("--root", copy).returncode
    page = (copy / "docs/reproduction.md").read_text()
    [named] = [t for t in page.split("### FEMNIST, CNN")[1].splitlines() if "Not run yet" in t][:1]
    assert "LAME" in named
    title = load_experiment(str(copy / "experiments/question-points.toml")).title
    assert f"): {title}\n" in page.split("### Not run yet")[1]
