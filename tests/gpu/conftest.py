"""Tests that need a GPU: `make test-gpu`, with the machine's own torch.

`--results FILE` writes where they ran and how each of them ended.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowdup.files import write_atomic
from flowdup.provenance import provenance

GPU = torch.device("cuda")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="a JSON file for every test's outcome")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--results")
    if file and not hasattr(config, "workerinput"):  # xdist's workers report to the first process
        config.pluginmanager.register(Recorder(file))


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.exit("torch sees no GPU here", returncode=2)
    return GPU


class Recorder:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Once each for a test's setup, call and teardown: the first that does not pass counts."""
        row = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        row["seconds"] = round(row["seconds"] + report.duration, 3)
        if row["outcome"] == "passed" and not report.passed:
            row["outcome"] = report.outcome
            row["reason"] = _reason(report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return  # broken off
        outcomes = [row["outcome"] for row in self.tests.values()]
        counts = {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}
        tests = [{"test": name} | row for name, row in self.tests.items()]
        found = provenance(GPU) | counts | {"tests": tests}
        write_atomic(self.file, (json.dumps(found, indent=2) + "\n").encode())


def _reason(report: pytest.TestReport) -> str:
    """What a skipped test said, or the first line of what went wrong."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext).splitlines()[0]
