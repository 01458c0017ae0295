"""Progress from what runs and downloads tell: bars on a terminal, now and then a line elsewhere."""

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner
from rich.text import Text

from flowdup.engines.distributed import is_main_process
from flowdup.errors import TrainingWarning
from flowdup.run.workers import Job

_SECONDS = 10.0  # between two lines in a file or a pipe


class _Bars:
    """Bars on stderr where that is a terminal; in a file or a pipe, lines."""

    def __init__(self, *columns: ProgressColumn, quiet: bool = False) -> None:
        self.console = Console(stderr=True)
        speaks = not quiet and is_main_process()
        self.writes_lines = speaks and not self.console.is_terminal
        self.wrote = time.monotonic()
        disable = not (speaks and self.console.is_terminal)
        self.progress = Progress(*columns, console=self.console, disable=disable)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def write(self, line: str) -> None:
        """A line where there are no bars, if there was none for a while."""
        if self.writes_lines and time.monotonic() >= self.wrote + _SECONDS:
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)
            self.wrote = time.monotonic()


class Preparing:
    """A line on a terminal's stderr that says what the package's log does, until it is stopped."""

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self.quiet = quiet or not console.is_terminal or not is_main_process()
        self.reader = _SpinnerReader(console)
        self.log = logging.getLogger("flowdup")
        self.level = self.log.level

    def start(self) -> None:
        """Turn the spinner, if there is a terminal."""
        if not self.quiet:
            self.log.setLevel(logging.INFO)
            self.log.addHandler(self.reader)
            self.reader.live.start()

    def stop(self) -> None:
        """Take the spinner away; it may start again."""
        if not self.quiet:
            self.reader.live.stop()
            self.log.removeHandler(self.reader)
            self.log.setLevel(self.level)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class _SpinnerReader(logging.Handler):
    """A spinner with the latest message of a log; it leaves nothing behind."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.spinner = Spinner("dots", "starting ...")
        self.live = Live(self.spinner, console=console, transient=True)

    def emit(self, record: logging.LogRecord) -> None:
        self.spinner.update(text=Text(f"{record.getMessage()} ..."))
        self.live.refresh()  # at once: the next message may come before the next frame


@contextmanager
def warning_lines(console: Console) -> Iterator[None]:
    """In here, a `TrainingWarning` is one line on the console, above a bar that it may show."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, TrainingWarning):
                told = Text.assemble(("warning:", "bold yellow"), f" {message}")
                console.print(told, soft_wrap=True)
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


class Rounds(_Bars):
    """One run: rounds, loss, accuracy on validation clients, rounds per second, time left.

    Until the first round is done it says what is under way, as the package's log has it: clients
    are loaded, a model is built, a step is compiled.  So an error comes before any bar.
    """

    def __init__(self, rounds: int) -> None:
        super().__init__(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  validation {task.fields[accuracy]}"),
            TextColumn("{task.fields[guards]}"),
            TextColumn("{task.fields[speed]} rounds/s"),
            TimeRemainingColumn(),
        )
        self.task = self.progress.add_task(
            "", total=rounds, loss="-", accuracy="-", speed="-", guards=""
        )
        self.rounds, self.refused = rounds, 0
        self.start: tuple[int, float] | None = None
        self.preparing = Preparing(console=self.console)
        self.warnings = warning_lines(self.console)

    def __enter__(self) -> Self:
        self.warnings.__enter__()
        self.preparing.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.preparing.stop()
        self.warnings.__exit__(None, None, None)
        if self.start is not None:
            super().__exit__(*error)

    def show(self, metrics: dict[str, Any]) -> None:
        """Move the bar to the round of these metrics."""
        loss = metrics["loss"]
        fields: dict[str, Any] = {"loss": "-" if loss is None else f"{loss:.4f}"}
        begins = self.start is None
        if self.start is None:  # a resumed run does not begin at 0
            self.start = (metrics["round"], metrics["seconds"])
        if "validation_accuracy" in metrics:
            fields["accuracy"] = f"{metrics['validation_accuracy']:.2f} %"
        self.refused += metrics.get("refused", 0)
        guards = [f"epsilon {metrics['epsilon']:.3g}"] if "epsilon" in metrics else []
        guards += [f"refused {self.refused}"] if self.refused else []
        fields["guards"] = "  ".join(guards)
        elapsed = metrics["seconds"] - self.start[1]
        if elapsed > 0:
            fields["speed"] = f"{(metrics['round'] - self.start[0]) / elapsed:.1f}"
        self.progress.update(self.task, completed=metrics["round"], **fields)
        known = self.progress.tasks[0].fields
        line = f"round {metrics['round']} of {self.rounds}: loss {known['loss']}, "
        line += f"validation {known['accuracy']}, {known['speed']} rounds/s"
        self.write(", ".join([line, *guards]))
        if begins:
            self.preparing.stop()
            self.progress.start()


class Jobs(_Bars):
    """Several runs in other processes, followed through their metrics files."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.jobs, self.tasks, self.stop = jobs, dict[str, TaskID](), Event()
        self.total = self.progress.add_task("runs: loading clients", total=len(jobs))
        self.watcher = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.watcher.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.stop.set()
        self.watcher.join()
        super().__exit__(*error)

    def done(self) -> None:
        """One run more is at its end."""
        self.progress.advance(self.total)

    def _watch(self) -> None:
        while not self.stop.wait(0.5):
            done = 0  # rounds
            for job in self.jobs:
                lines, rounds = job.run.count_rounds(), job.config.rounds
                title = f"{job.label or job.variant}, seed {job.config.seed}"
                if lines and title not in self.tasks:
                    self.tasks[title] = self.progress.add_task(title, total=rounds)
                    self.progress.update(self.total, description="runs")
                if title in self.tasks:
                    shown = lines < rounds
                    self.progress.update(self.tasks[title], completed=lines, visible=shown)
                done += lines
            runs, rounds = self.progress.tasks[0], sum(job.config.rounds for job in self.jobs)
            self.write(f"{runs.completed:.0f} of {runs.total:.0f} runs, {done} of {rounds} rounds")


class Downloads(_Bars):
    """A bar for every file that is fetched."""

    def __init__(self, quiet: bool) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            quiet=quiet,
        )
        self.tasks: dict[str, TaskID] = {}

    def show(self, name: str, done: int, total: int | None) -> None:
        """So many bytes of a file are here, of so many if that is known."""
        if name not in self.tasks:
            self.tasks[name] = self.progress.add_task(name, total=total)
        self.progress.update(self.tasks[name], completed=done)
