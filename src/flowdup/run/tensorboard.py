"""Metrics for TensorBoard, beside metrics.jsonl: RUN/tensorboard, if `run.log` asks for it."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flowdup.errors import ConfigError
from flowdup.metrics_file import Row
from flowdup.report import is_number

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TENSORBOARD = "tensorboard"


def check_installed(log: tuple[str, ...]) -> None:
    """Refuse to log with what is not there, before anything is trained."""
    if TENSORBOARD in log and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "run.log names tensorboard, which is not installed: run `pip install "
            "'flowdup[tensorboard]'`, or set run.log = []"
        )


class TensorBoardLog:
    """Every number of a round's metrics under its name; nothing without a writer."""

    def __init__(self, writer: "SummaryWriter | None") -> None:
        self.writer = writer

    def add(self, metrics: Row) -> None:
        """A round's numbers; nothing where it is not asked for."""
        if self.writer is None:
            return
        for name, value in metrics.items():
            if name != "round" and is_number(value):
                self.writer.add_scalar(name, value, metrics["round"])


@contextmanager
def tensorboard_log(folder: Path, log: tuple[str, ...], last: int) -> Iterator[TensorBoardLog]:
    """The log of a run that goes on after round `last`: what a crash left of later ones is void."""
    if TENSORBOARD not in log:
        yield TensorBoardLog(None)
        return
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (an extra)

    writer = SummaryWriter(folder / TENSORBOARD, purge_step=last + 1)
    try:
        yield TensorBoardLog(writer)
    finally:
        writer.close()
