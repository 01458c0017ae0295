"""What a table consists of: cells, the settings that each may choose from, and their runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flowdup.campaign.identity import deciding_settings, identity
from flowdup.config import Config


@dataclass(frozen=True)
class Run:
    """One configuration and its identity."""

    config: Config

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the settings that decide what the run gives: its identity in records."""
        return identity(deciding_settings(self.config))


@dataclass(frozen=True)
class Candidate:
    """One of the settings that a cell chooses from: a run for every seed."""

    searched: dict[str, Any]  # by dotted names
    runs: dict[int, Run]

    @property
    def label(self) -> str:
        """What this candidate sets, for people."""
        return ", ".join(f"{key} = {value}" for key, value in self.searched.items())


@dataclass(frozen=True)
class Cell:
    """One number of a table: settings to choose from, and what the paper has."""

    row: str
    column: str
    candidates: tuple[Candidate, ...]
    seeds: tuple[int, ...]  # that its mean is over
    paper: tuple[float, float] | None  # mean and deviation
    search_column: str  # where its row's settings are searched, its own column or another
    embedded: str = ""  # the trait that colours the clients' embeddings, where they are kept
    chosen_by: "Cell | None" = None  # another, with as many settings to choose from, that decides

    @property
    def title(self) -> str:
        """Row and column, for people."""
        return f"{self.row}, {self.column}"


@dataclass(frozen=True)
class Experiment:
    """A table of many runs, as a file in experiments/ describes it."""

    name: str
    title: str
    paper: str
    note: str
    preset: str
    reference: str
    unequal: str
    search_seeds: tuple[int, ...]
    support: tuple[int, ...]  # numbers of points that models are made from, too
    show: str  # the measure of the short table
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    search: dict[str, dict[str, list[Any]]]  # by row
    cells: tuple[Cell, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """All that any cell has."""
        return tuple(dict.fromkeys(seed for cell in self.cells for seed in cell.seeds))

    def decider(self, cell: Cell) -> Cell:
        """The cell whose search is decisive."""
        if cell.chosen_by:
            return cell.chosen_by
        return next(c for c in self.cells if (c.row, c.column) == (cell.row, cell.search_column))

    def narrowed(self, columns: Sequence[str]) -> "Experiment":
        """These columns alone; their settings are chosen where they were."""
        cells = [
            cell if (decider := self.decider(cell)) is cell else replace(cell, chosen_by=decider)
            for cell in self.cells
            if cell.column in columns
        ]
        names = tuple(column for column in self.columns if column in columns)
        return replace(self, columns=names, cells=tuple(cells))
