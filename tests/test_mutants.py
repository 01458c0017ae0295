"""The catalogue of planted bugs fits the source: `make mutants` plants them, this reads them."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants.catalogue import ROOT, Mutant, read_catalogue

CATALOGUE = read_catalogue()


def claims(file: Path) -> set[str]:
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_there_are_at_least_63_bugs_with_names_of_their_own() -> None:
    assert len({mutant.name for mutant in CATALOGUE}) == len(CATALOGUE) >= 63


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: mutant.name)
def test_a_bug_fits_its_file_and_its_tests_exist(mutant: Mutant) -> None:
    source = (ROOT / mutant.path).read_text("utf-8")
    changed = mutant.apply(source)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))  # it is Python, and differs
    assert mutant.harm and mutant.tests
    for test in mutant.tests:
        file, _, claim = test.partition("::")
        assert claim.partition("[")[0] in claims(ROOT / file)


def test_a_bug_whose_place_is_gone_is_named() -> None:
    with pytest.raises(ValueError, match="stands 0 times"):
        CATALOGUE[0].apply("")


PLANTED = """
[[mutant]]
name = "not a bug"
harm = "none"
file = "aggregation.py"
before = "round, points, rows, clients = 0, 0, 0, 0"
after = "clients, rows, points, round = 0, 0, 0, 0"
tests = ["tests/test_aggregation.py::test_replies_themselves_are_left_as_they_came"]

[[mutant]]
name = "a hang"
harm = "nothing ends"
file = "aggregation.py"
before = "    for reply in replies:\\n        for name"
after = "    while True:\\n        pass\\n    for reply in replies:\\n        for name"
tests = ["tests/test_aggregation.py::test_replies_themselves_are_left_as_they_came"]
seconds = 4

[[mutant]]
name = "a module that cannot be imported"
harm = "every test fails, which says nothing"
file = "aggregation.py"
before = "class Update(NamedTuple):"
after = "class Update(Unknown):"
tests = ["tests/test_aggregation.py::test_replies_themselves_are_left_as_they_came"]

[[mutant]]
name = "a bug"
harm = "sums are written into the first reply"
file = "aggregation.py"
before = "sums[name] = sums[name] + change"
after = "sums[name].add_(change)"
tests = ["tests/test_aggregation.py::test_replies_themselves_are_left_as_they_came"]
"""


def test_bugs_that_no_test_catches_are_reported(tmp_path: Path) -> None:
    """The source in the working tree stays as it is."""
    (tmp_path / "planted.toml").write_text(PLANTED)
    source = (ROOT / "src/flowdup/aggregation.py").read_bytes()
    command = [sys.executable, "-m", "mutants", "--catalogue", tmp_path, "--jobs", "2"]
    done = subprocess.run(
        list(map(str, [*command, "--results", tmp_path / "results.json"])),
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    told = json.loads((tmp_path / "results.json").read_text())
    verdicts = {row["name"]: row["verdict"].partition(":")[0] for row in told["mutants"]}
    assert verdicts == {
        "not a bug": "survived",
        "a hang": "survived",
        "a module that cannot be imported": "broken",
        "a bug": "caught",
    }
    assert told["caught"] == 1 and len(told["survived"]) == 3
    assert {"device", "versions", "commit"} <= told.keys()
    assert (ROOT / "src/flowdup/aggregation.py").read_bytes() == source
