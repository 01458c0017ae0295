"""The fuzzer runs, and reports a foreign error, a hang and a death where there is one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Its exit code and what it found."""
    command = [sys.executable, "-m", "fuzz", "--workers", "1", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text())


def test_some_cases_of_every_kind_are_answered_by_flowdup_itself(tmp_path: Path) -> None:
    code, found = run(tmp_path / "fuzz.json", "--cases", "60")
    assert code == 0, found["failed"]
    assert found["failures"] == 0 and len(found["kinds"]) == 18
    assert sum(row["refused"] for row in found["kinds"].values()) > 20
    assert {"seed", "device", "versions", "commit", "peak_bytes", "limits"} <= found.keys()


def test_failures_are_seen(tmp_path: Path) -> None:
    code, found = run(tmp_path / "fuzz.json", "--planted", "--cases", "3", "--seconds", "1")
    assert code == 1 and found["failures"] == 3
    reasons = {row["kind"]: row["why"] for row in found["failed"]}
    assert "ZeroDivisionError" in reasons["a foreign error"]
    assert reasons["a hang"] == "it took longer than 1.0 s"
    assert reasons["a death"] == "the process died"
