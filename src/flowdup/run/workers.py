"""Runs of a comparison in worker processes, which stop when their parent says so and end with it.

A worker that is killed is one sentence (`WorkerError`), and no lock is shared that it might take
along: parent and worker speak through a pipe alone.
"""

import os
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import NamedTuple

import torch

from flowdup.config import Config
from flowdup.devices import gpu_is_full
from flowdup.errors import FlowdupError, TrainingWarning, WorkerError
from flowdup.registry import import_modules
from flowdup.run.folder import RunFolder
from flowdup.run.results import evaluate_run
from flowdup.run.training import train_run

_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_POLL_SECONDS = 0.2  # between two looks at whether to stop
_FAREWELL_SECONDS = 5.0  # for a worker to end by itself; its runs are saved, if it does not
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    variant: str
    config: Config
    run: RunFolder
    evaluate: bool = True  # on test clients, once trained
    support: tuple[int, ...] = ()  # also of models that are made from so many points
    label: str = ""  # the variant for people, by what differs from its like; empty: its name

    @property
    def title(self) -> str:
        """Which run it is, for a message."""
        return f"variant '{self.variant}' with seed {self.config.seed}"


class Ended(NamedTuple):
    """A job that is no longer run."""

    job: Job
    outcome: bool | Exception  # True: it is done; False: it was stopped, and can go on
    seconds: float


class _Worker:
    """A process, and the job that it has."""

    def __init__(self, threads: int, modules: Sequence[str]) -> None:
        self.threads, self.modules = threads, modules
        spawn = get_context("spawn")
        self.connection, other = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(other, threads, modules))
        with _signals_held():  # until the worker knows what to do with them
            self.process.start()
        other.close()  # so that the worker's death closes the pipe
        self.job: Job | None = None
        self.since = 0.0  # when it took the job
        self.spoiled = False  # by an error that nobody foresaw: CUDA's leave nothing that works

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            return  # it is dead, which its silence will tell

    def take(self, job: Job) -> None:
        self.job, self.since = job, time.monotonic()
        self.send(job)

    def finish(self) -> Ended:
        job, self.job = self.job, None
        assert job is not None
        outcome = self._outcome(job)
        self.spoiled = isinstance(outcome, Exception) and not isinstance(outcome, FlowdupError)
        return Ended(job, outcome, time.monotonic() - self.since)

    def end(self) -> None:
        self.send(None)
        self.process.join(_FAREWELL_SECONDS)
        self.process.kill()
        self.process.join()

    def _outcome(self, job: Job) -> bool | Exception:
        try:
            outcome: bool | Exception = self.connection.recv()
            return outcome
        except (EOFError, OSError):
            self.process.join()
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "ended by itself"
        return WorkerError(
            f"the process of {job.title} {how}: start again to go on from what it saved, with "
            "fewer processes at a time if memory ran out"
        )


def run_comparison(
    jobs: Sequence[Job],
    workers: int,
    modules: Sequence[str] = (),
    stop: Stop | None = None,
) -> Iterator[Job]:
    """Run jobs in so many processes and yield each as it is done; `modules` register a user's own.

    When `stop` says so, or one job fails, the others save the round in hand and stop; then the
    first error is raised.
    """
    error: Exception | None = None
    stopped: Exception | None = None

    def ending() -> bool:
        return bool(error or stopped or (stop is not None and stop()))

    for job, outcome, _ in run_jobs(deque(jobs), min(workers, len(jobs)), modules, ending):
        if outcome is True:
            yield job
        elif isinstance(outcome, Exception):
            error = error or outcome
        elif not error:  # a signal reached it, perhaps before this process
            stopped = stopped or WorkerError(f"{job.title} was stopped: start again to go on")
    if error := error or (None if stop is not None and stop() else stopped):
        raise error


def run_jobs(
    waiting: deque[Job], workers: int, modules: Sequence[str], stop: Stop
) -> Iterator[Ended]:
    """Run jobs in so many processes and yield each as it ends, however it does.

    Between two of them the caller may change what is waiting: the processes go on with that.  When
    `stop` says so, nothing more is begun, and what is in hand saves its round and stops.  A process
    that died is not replaced; with the last one it ends, whatever is waiting.  One with an error
    that nobody foresaw is, before it would get another job.
    """
    stopping = False
    with _started(workers, modules) as pool:
        while pool and (waiting or any(worker.job for worker in pool)):
            if not stopping and stop():
                stopping = True
                for worker in pool:
                    worker.send(None)
            if stopping:
                waiting.clear()
            for place, worker in enumerate(pool):
                if not waiting or worker.job:
                    continue
                if worker.spoiled:
                    worker.end()
                    pool[place] = _Worker(worker.threads, worker.modules)
                pool[place].take(waiting.popleft())
            for worker in _ready(pool):
                ended = worker.finish()
                if not worker.process.is_alive():
                    pool.remove(worker)
                yield ended


@contextmanager
def _started(workers: int, modules: Sequence[str]) -> Iterator[list[_Worker]]:
    """Workers that share the cores; none is left in the end."""
    threads, pool = max(1, torch.get_num_threads() // workers), list[_Worker]()
    try:
        for _ in range(workers):
            pool.append(_Worker(threads, modules))
        yield pool
        for worker in pool:
            worker.send(None)
        for worker in pool:
            worker.process.join(_FAREWELL_SECONDS)
    finally:
        for worker in pool:
            worker.process.kill()
            worker.process.join()


def _ready(pool: list[_Worker]) -> list[_Worker]:
    """Those whose job has come to an end, after a while at most."""
    busy = [worker for worker in pool if worker.job]
    ready = wait([worker.connection for worker in busy], _POLL_SECONDS)
    return [worker for worker in busy if worker.connection in ready]


def _serve(connection: Connection, threads: int, modules: Sequence[str]) -> None:
    """A worker's life: jobs until there is something else in the pipe."""
    Thread(target=_end_with_parent, daemon=True).start()
    received: list[int] = []  # signals
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent, too
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore", TrainingWarning)  # of many runs at once; the doctor tells each
    while job := connection.recv():
        try:
            import_modules(modules)
            connection.send(_run(job, lambda: bool(received) or connection.poll()))
        except FlowdupError as error:
            connection.send(error)
        except torch.OutOfMemoryError:
            connection.send(gpu_is_full(job.title))
        except Exception:
            connection.send(RuntimeError(f"{job.title} failed\n{traceback.format_exc()}"))


def _run(job: Job, stop: Stop) -> bool:
    """Train and, if asked, evaluate; False if it was stopped, and what it did is saved."""
    for _ in train_run(job.config, job.run.path, resume=True, stop=stop):
        pass
    if stop():
        return False
    if job.evaluate:
        evaluate_run(job.run.path, support=job.support)
    return True


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)  # as if killed, which loses nothing


@contextmanager
def _signals_held() -> Iterator[None]:
    """Processes started in here begin with SIGINT and SIGTERM held back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
