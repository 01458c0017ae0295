"""Which of a cell's settings is taken: by validation clients alone, with the search seeds alone."""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flowdup.campaign.cells import Candidate, Cell, Experiment
from flowdup.campaign.records import Records, search_accuracy


@dataclass(frozen=True)
class Choice:
    """The setting that was best on validation clients, among those that were tried."""

    candidate: Candidate | None  # None: not all have been tried, or all have failed
    tried: list[dict[str, Any]]  # settings and accuracy on validation clients, or why it failed
    complete: bool


def choose(experiment: Experiment, cell: Cell, records: Records) -> Choice:
    """The first of the best on validation clients, once all have been tried.

    A single candidate needs no trial, and its validation accuracy is not asked for.
    """
    if len(cell.candidates) == 1:
        return Choice(cell.candidates[0], [], True)
    tried: list[dict[str, Any]] = []
    best: tuple[float, Candidate] | None = None
    complete = True
    decisive = experiment.decider(cell).candidates
    for candidate, own in zip(decisive, cell.candidates, strict=True):
        found = [records.get(candidate.runs[seed]) for seed in experiment.search_seeds]
        failed = [record["failed"] for record in found if record and "failed" in record]
        entry: dict[str, Any] = {"settings": candidate.searched}
        if failed:
            tried.append(entry | {"failed": failed[0]})
            continue
        values = [search_accuracy(record) for record in found if record]
        if len(values) < len(found):
            complete = False
            continue
        score = fmean(values)
        tried.append(entry | {"validation": score})
        if best is None or score > best[0]:
            best = score, own
    return Choice(best[1] if best and complete else None, tried, complete)
