"""The fuzzer runs, sees a failure when there is one, and its stored result has none."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tests/fuzz", "--workers", "1", "--out", str(out), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_some_cases_of_every_kind_are_answered_by_flowdup_itself(tmp_path: Path) -> None:
    done = run(tmp_path / "fuzz.json", "--cases", "60")
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "fuzz.json").read_text())
    assert found["failures"] == 0 and len(found["kinds"]) == 13
    assert sum(row["refused"] for row in found["kinds"].values()) > 20
    assert {"seed", "device", "versions", "commit", "peak_bytes", "limits"} <= found.keys()


def test_the_stored_result_is_of_ten_thousand_cases_without_a_failure() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "fuzz.json").read_text())
    assert found["cases"] >= 10_000 and found["failures"] == 0
    assert found["slowest_seconds"] < found["limits"]["seconds"]
    assert found["peak_bytes"] < found["limits"]["memory_bytes"]
