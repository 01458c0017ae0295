"""The catalogue of planted bugs: small patches of the source, each with the tests that must fail.

Beware: `before` must stand exactly once in its file; `tests/test_mutants.py` fails where it no
longer does.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = Path("src/flowdup")


@dataclass(frozen=True)
class Mutant:
    """One bug, of the kind that a tired engineer could write."""

    name: str
    harm: str  # what it would mean for a user
    file: str  # in src/flowdup
    before: str
    after: str
    tests: tuple[str, ...]  # the narrowest ids of pytest; at least one must fail
    seconds: float = 60.0  # the time limit of its tests
    hangs: bool = False  # whether not ending within the limit counts as caught

    @property
    def path(self) -> Path:
        """Seen from the root of a source tree."""
        return SOURCE / self.file

    def apply(self, source: str) -> str:
        """The file's text with the bug in it; ValueError if its place is not found once."""
        if (places := source.count(self.before)) != 1:
            raise ValueError(f"'{self.name}': its text stands {places} times in {self.path}")
        return source.replace(self.before, self.after)


def read_catalogue(folder: Path = Path(__file__).parent) -> list[Mutant]:
    """All planted bugs, file by file."""
    found = []
    for file in sorted(folder.glob("*.toml")):
        for row in tomllib.loads(file.read_text("utf-8"))["mutant"]:
            found.append(_read(row))
    return found


def _read(row: dict[str, Any]) -> Mutant:
    return Mutant(**row | {"tests": tuple(row["tests"])})
