"""What the long attacks gave when they were last run, as it is committed."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    assert {"device", "versions", "commit"} <= found.keys()
    return found


def test_torture_found_no_deviation() -> None:
    found = read("torture")
    assert found["deviations"] == 0
    assert found["kills"]["kills"] >= 500 and found["writers"]["pairs"] >= 50


def test_fuzzing_found_no_failure() -> None:
    found = read("fuzz")
    assert found["cases"] >= 10_000 and found["failures"] == 0
    assert found["slowest_seconds"] < 5 and found["peak_bytes"] < found["limits"]["memory_bytes"]


def test_planted_bugs_were_caught() -> None:
    found = read("mutants")
    assert len(found["mutants"]) >= 63 and len(found["survived"]) <= 1
