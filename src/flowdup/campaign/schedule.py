"""The runs that tables still need, and running them: many at a time, stopped and continued at will.

What is needed follows from the tables and the records alone.  So runs can be stopped, continued,
done on another machine and merged; a run that several cells share is needed once.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowdup.campaign.cells import Experiment, Run
from flowdup.campaign.records import (
    Record,
    Records,
    by_support,
    embeddings_of,
    failed_record,
    record_of,
)
from flowdup.campaign.selection import choose
from flowdup.config import Config
from flowdup.errors import FolderInUseError, TrainingError
from flowdup.provenance import provenance
from flowdup.run import RunFolder
from flowdup.run.workers import Job, run_jobs

_FOLDER_DIGITS = 16  # of a run's identity, which name its folder


@dataclass(frozen=True)
class Need:
    """A run that is missing, or something of it that is."""

    title: str
    run: Run
    evaluate: bool  # on test clients: only runs of settings that are chosen
    support: tuple[int, ...] = ()
    embedded: str = ""  # by this trait

    def met_by(self, record: Record | None) -> bool:
        """Whether a record has all that is needed of its run; a failed run counts as tried."""
        if record is None:
            return False
        if "failed" in record or not self.evaluate:
            return True
        return (
            "test" in record
            and by_support(record).keys() >= {*self.support}
            and (not self.embedded or "embedding" in record)
        )

    def joined(self, other: "Need | None") -> "Need":
        """What either asks of the run that they share."""
        if other is None:
            return self
        return replace(
            self,
            evaluate=self.evaluate or other.evaluate,
            support=tuple(sorted({*self.support, *other.support})),
            embedded=self.embedded or other.embedded,
        )


@dataclass(frozen=True)
class Plan:
    """What tables need: known runs by identity, in the order in which to do them."""

    known: dict[str, Need]
    missing: dict[str, Need]
    later: int  # runs of settings that are not chosen yet


def plan(experiments: Sequence[Experiment], records: Records) -> Plan:
    """First all cells with the first seed, then with the second, and so on."""
    turns: dict[int, list[Need]] = {}
    later = 0
    for experiment in experiments:
        for cell in experiment.cells:
            choice = choose(experiment, cell, records)
            decider = experiment.decider(cell)
            if len(cell.candidates) > 1 and (decider is cell or cell.chosen_by):
                for candidate in decider.candidates:
                    for turn, seed in enumerate(experiment.search_seeds):
                        title = (
                            f"{experiment.name}: {decider.title}, {candidate.label}, seed {seed}"
                        )
                        need = Need(title, candidate.runs[seed], False)
                        turns.setdefault(turn, []).append(need)
            if choice.candidate is None:
                later += 0 if choice.complete else len(cell.seeds)
                continue
            for turn, seed in enumerate(cell.seeds):
                embedded = cell.embedded if turn == 0 else ""
                title = f"{experiment.name}: {cell.title}, seed {seed}"
                run = choice.candidate.runs[seed]
                need = Need(title, run, True, experiment.support, embedded)
                turns.setdefault(turn, []).append(need)
    known: dict[str, Need] = {}
    for turn in sorted(turns):
        for need in turns[turn]:
            known[need.run.digest] = need.joined(known.get(need.run.digest))
    missing = {d: need for d, need in known.items() if not need.met_by(records.get(need.run))}
    return Plan(known, missing, later)


def _without_familiarity(config: Config) -> Config:
    """Storing nothing to tell foreign clients by, which takes as long as many rounds."""
    return replace(config, run=replace(config.run, false_alarms=0.0))


@dataclass(frozen=True)
class Progress:
    """A run that is done, and how far the whole is."""

    need: Need
    record: Record
    seconds: float
    done: int
    left: int  # as far as it is known: settings that are not chosen yet have runs of their own


def run_campaign(
    experiments: Sequence[Experiment],
    records: Records,
    work: Path,
    workers: int,
    seconds: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
    modules: Sequence[str] = (),
) -> Iterator[Progress]:
    """Do what is missing in so many processes; every record is saved before it is yielded.

    Run folders are in `work`, under their identity.  With `seconds`, a run is begun only if the
    longest so far of the same model, data and method would end in time (one that is trained, and
    waits for its test clients, is begun anyhow); at the end of it what is in hand is saved and
    stopped.  A run that diverges is an outcome.  One that another campaign has in hand is left to
    it, and tried again when another is done.  One that fails otherwise is left out, and its error
    raised in the end; after as many as there are processes all stops.
    """
    end = time.monotonic() + (seconds or float("inf"))
    longest: dict[tuple[str, ...], float] = {}
    waiting: deque[Job] = deque()
    in_hand: dict[Path, Need] = {}
    left_out: dict[str, Exception] = {}
    first = plan(experiments, records)
    if not first.missing:
        return

    def kind(need: Need) -> tuple[str, ...]:
        config = need.run.config
        return config.model, config.data.source, config.method.name

    def refill() -> Plan:
        """What is missing and neither in hand nor too long for the time left."""
        latest = plan(experiments, records)
        for digest in [d for d, e in left_out.items() if isinstance(e, FolderInUseError)]:
            del left_out[digest]  # it may be free by now
        queued = {job.run.path for job in waiting}
        busy = {need.run.digest for path, need in in_hand.items() if path not in queued}
        for path in queued:
            del in_hand[path]
        waiting.clear()
        for digest, need in latest.missing.items():
            folder = RunFolder(work / digest[:_FOLDER_DIGITS])
            trained = records.get(need.run) is not None and folder.started
            lasts = 0.0 if trained else longest.get(kind(need), 0.0)
            fits = time.monotonic() + lasts <= end
            if fits and digest not in busy | left_out.keys():
                in_hand[folder.path] = need
                config, evaluates = _without_familiarity(need.run.config), need.evaluate
                waiting.append(Job(need.title, config, folder, evaluates, need.support))
        return latest

    def failures() -> list[Exception]:
        return [e for e in left_out.values() if not isinstance(e, FolderInUseError)]

    def stopping() -> bool:
        return len(failures()) >= workers or stop() or time.monotonic() >= end

    where = provenance(next(iter(first.missing.values())).run.config.engine.torch_device())
    refill()
    for job, outcome, spent in run_jobs(waiting, workers, modules, stopping):
        need = in_hand.pop(job.run.path)
        if isinstance(outcome, TrainingError):
            record = failed_record(need.run, outcome, where)
        elif isinstance(outcome, Exception):
            left_out[need.run.digest] = outcome
            continue
        elif not outcome:
            continue
        else:
            longest[kind(need)] = max(spent, longest.get(kind(need), 0.0))
            record = record_of(need.run, job.run, need.evaluate, where)
            if need.embedded:
                record["embedding"] = embeddings_of(job.run, need.run, need.embedded)
        records.add(record)
        records.save()
        assert need.met_by(records.get(need.run)), need.title  # or it would be done again and again
        latest = refill()
        done = len(latest.known) - len(latest.missing)
        yield Progress(need, record, spent, done, len(latest.missing))
    for error in failures():
        raise error
