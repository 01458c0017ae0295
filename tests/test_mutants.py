"""The catalogue of planted bugs fits the source: `make mutants` plants them, this reads them."""

import ast
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
