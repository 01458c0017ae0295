"""The tables of README.md and docs/ say what the result files say."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    assert "stale tables in README.md: run `make tables`" in stale.stderr
    assert not tables("--root", copy).returncode
    assert not tables("--check", "--root", copy).returncode


def test_a_figure_changed_by_hand_is_noticed(copy: Path) -> None:
    readme = copy / "README.md"
    readme.write_text(readme.read_text().replace("| 0.63 |", "| 0.36 |", 1))
    assert tables("--check", "--root", copy).returncode


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

    for name in ("results/first-look.json", "benchmarks/results/gpu.json"):
        change(copy / name, forget)
    deciles = copy / "results/digits-methods.json"
    change(deciles, lambda rows: [row.update(worst_decile=9.9) for row in rows])
    done = tables("--root", copy)
    assert not done.returncode, done.stderr
    assert "| worst decile |" in (copy / "docs/results.md").read_text()
