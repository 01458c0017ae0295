"""Reproduce tables: merge records, plan, run what is missing, write results/TABLE.json."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowdup.campaign.cells import Experiment
from flowdup.campaign.experiment import experiment_names, load_experiment
from flowdup.campaign.records import Records
from flowdup.campaign.results import write_results
from flowdup.campaign.schedule import Progress, plan, run_campaign
from flowdup.errors import ConfigError, FlowdupError, shorten
from flowdup.settings import nearest

ALL = "all"


@dataclass(frozen=True)
class Request:
    """What to reproduce, where and for how long; every field is an option of the command."""

    tables: Sequence[str]  # names, TOML files, or `all`; TABLE/ROW,ROW for some rows of one
    jobs: int = 0  # runs at a time; 0: one per core
    seconds: float = 0.0  # 0: until all is done
    seeds: int = 0  # so many of the first; 0: all
    rows: str = ""  # names with commas between; empty: all
    columns: str = ""  # the same of columns
    settings: Sequence[str] = ()  # engine.KEY=VALUE
    work: Path = Path("runs/campaign")  # the run folders
    records: Path = Path("results/runs.jsonl")
    merge: Sequence[Path] = ()  # other files of records
    results: Path = Path("results")
    dry_run: bool = False
    run: bool = True  # False: merge, and write what the records say


@dataclass(frozen=True)
class Event:
    """Something to tell: a sentence for people and the same for machines."""

    sentence: str
    data: dict[str, Any]


def reproduce(
    request: Request, stop: Callable[[], bool] = lambda: False, modules: Sequence[str] = ()
) -> Iterator[Event]:
    """Do what a request asks and tell of it; nothing is run or written in a dry run."""
    whole, chosen = _load(request)
    for path in request.merge:
        if not path.exists():
            raise ConfigError(f"there is no file {path} to merge: give a file of records")
    records = Records.read(request.records)
    others = [Records.read(path) for path in request.merge]
    if others:
        new = records.merge(others)
        yield Event(f"merged {new} new records", {"merged": new})
        if new and not request.dry_run:
            records.save()
    for experiment in chosen:
        yield _planned(experiment, records)
    if request.dry_run:
        return
    first = plan(chosen, records)
    useful = max(1, len(first.missing) + first.later)
    workers = min(request.jobs or os.cpu_count() or 1, useful)
    work, seconds = request.work, request.seconds
    error: Exception | None = None
    todo = chosen if request.run else []
    try:
        for progress in run_campaign(todo, records, work, workers, seconds, stop, modules):
            yield _done(progress)
    except (FlowdupError, RuntimeError) as raised:  # of a run: there are results of the others
        error = raised
    records.merge([Records.read(request.records)])  # what other processes have done since
    for experiment in whole:
        path = write_results(experiment, records, request.results)
        yield Event(f"wrote {path}", {"results": str(path)})
    if error:
        raise error
    left = plan(chosen, records)
    if left.missing or left.later:
        count = len(left.missing) + left.later
        sentence = f"{count} runs are left: the same command goes on with them"
        yield Event(sentence, {"left": count})


def _load(request: Request) -> tuple[list[Experiment], list[Experiment]]:
    """The tables as they are, which results are of, and the part that is to be run."""
    wanted = sorted(experiment_names()) if ALL in request.tables else list(request.tables)
    if not wanted:
        raise ConfigError("name at least one table, a TOML file, or 'all'")
    for option in ("jobs", "seeds", "seconds"):
        if getattr(request, option) < 0:
            raise ConfigError(f"--{option} cannot be below 0")
    parts = [_name_and_rows(text) for text in wanted]
    if request.rows and any(rows for _, rows in parts):
        raise ConfigError("give rows as TABLE/ROW or with --rows, not both")
    whole = {name: load_experiment(name) for name, _ in parts}
    for name, rows in parts:
        _titles("row", rows, whole[name].rows)
    _titles("row", request.rows, [row for table in whole.values() for row in table.rows])
    chosen = [
        load_experiment(name, request.settings, request.seeds, rows or request.rows)
        for name, rows in parts
    ]
    known = [column for table in whole.values() for column in table.columns]
    if columns := _titles("column", request.columns, known):
        chosen = [experiment.narrowed(columns) for experiment in chosen]
    return list(whole.values()), chosen


def _name_and_rows(text: str) -> tuple[str, str]:
    """Of TABLE, FILE.toml, TABLE/ROW,ROW or FILE.toml/ROW,ROW; no rows: all."""
    folder, file, rest = text.rpartition(".toml")
    name, _, rows = rest.partition("/")
    return f"{folder}{file}{name}", rows


def _titles(what: str, given: str, known: Sequence[str]) -> list[str]:
    """Those that an option names with commas between; ConfigError if no table has one."""
    titles = [word.strip() for word in given.split(",")] if given else []
    for title in titles:
        if title not in known:
            raise ConfigError(
                f"no {what} is called '{shorten(title)}'{nearest(title, list(known))}: use some of "
                f"{', '.join(dict.fromkeys(known))}"
            )
    return titles


def _planned(experiment: Experiment, records: Records) -> Event:
    found = plan([experiment], records)
    done = len(found.known) - len(found.missing)
    more = f", and {found.later} once settings are chosen" if found.later else ""
    return Event(
        f"{experiment.name}: {len(experiment.cells)} cells, {done} of {len(found.known)} runs are "
        f"done{more}",
        {
            "table": experiment.name,
            "cells": len(experiment.cells),
            "runs": len(found.known),
            "done": done,
            "later": found.later,
        },
    )


def _done(progress: Progress) -> Event:
    record = progress.record
    if "failed" in record:
        outcome = record["failed"]
    else:
        outcome = f"validation {record['validation']:.1f}"
        if "test" in record:
            outcome += f", test {record['test']['transductive']['accuracy']['mean']:.1f}"
    return Event(
        f"{progress.need.title}: {outcome} ({progress.seconds:.0f} s; {progress.left} to go)",
        {
            "done": progress.need.title,
            "digest": progress.need.run.digest,
            "outcome": outcome,
            "seconds": progress.seconds,
            "left": progress.left,
        },
    )
