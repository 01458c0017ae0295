"""Progress bars, readers of what runs and downloads tell."""

from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flowdup.run.folder import RunFolder


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self.progress = progress

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


class Rounds(_Bars):
    """One run: rounds, loss, accuracy on validation clients, rounds per second, time left."""

    def __init__(self, console: Console, rounds: int) -> None:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  validation {task.fields[accuracy]}"),
            TextColumn("{task.fields[speed]} rounds/s"),
            TimeRemainingColumn(),
        )
        super().__init__(Progress(*columns, console=console))
        self.task = self.progress.add_task("", total=rounds, loss="-", accuracy="-", speed="-")
        self.start: tuple[int, float] | None = None

    def show(self, metrics: dict[str, Any]) -> None:
        loss = metrics["loss"]
        fields: dict[str, Any] = {"loss": "-" if loss is None else f"{loss:.4f}"}
        if self.start is None:  # a resumed run does not begin at 0
            self.start = (metrics["round"], metrics["seconds"])
        if "validation_accuracy" in metrics:
            fields["accuracy"] = f"{metrics['validation_accuracy']:.2f} %"
        elapsed = metrics["seconds"] - self.start[1]
        if elapsed > 0:
            fields["speed"] = f"{(metrics['round'] - self.start[0]) / elapsed:.1f}"
        self.progress.update(self.task, completed=metrics["round"], **fields)


class Jobs(_Bars):
    """Several runs in other processes, followed through their metrics files."""

    def __init__(self, console: Console, rounds: dict[str, int]) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        super().__init__(Progress(*columns, console=console))
        self.rounds, self.tasks, self.stop = rounds, dict[str, TaskID](), Event()
        self.total = self.progress.add_task("runs", total=len(rounds))
        self.watcher = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.watcher.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.stop.set()
        self.watcher.join()
        super().__exit__(*error)

    def done(self) -> None:
        self.progress.advance(self.total)

    def _watch(self) -> None:
        while not self.stop.wait(0.5):
            for folder, rounds in self.rounds.items():
                lines = RunFolder(Path(folder)).count_rounds()
                if lines and folder not in self.tasks:
                    self.tasks[folder] = self.progress.add_task(folder, total=rounds)
                if folder in self.tasks:
                    shown = lines < rounds
                    self.progress.update(self.tasks[folder], completed=lines, visible=shown)


class Downloads(_Bars):
    def __init__(self, console: Console, quiet: bool) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        super().__init__(Progress(*columns, console=console, disable=quiet))
        self.tasks: dict[str, TaskID] = {}

    def show(self, name: str, done: int, total: int | None) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.progress.add_task(name, total=total)
        self.progress.update(self.tasks[name], completed=done)
