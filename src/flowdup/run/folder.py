"""The files of a run folder, and of a comparison's: their names, how each is written and read.

config.toml     the resolved settings
clients.json    who is in which group, who has labels, and of which images each is made;
                of lazy clients, how they are made
metrics.jsonl   one line per round
checkpoint/     psi and the server's state (`checkpoint.py`); it seals what the run was started with
best/           the same of the round that was best on validation clients, or of the start of the
                stage if none was better, where that is to be kept; in the one that counts,
                familiarity.json of a finished run (`foreign_clients.py`)
lock            which process trains into the folder (`lock.py`)
evaluation.json metrics of test clients (`evaluate_run`)
certificate.json bounds on clients' errors, thresholds of prediction sets (`certify_run`)
certificate.*   a figure of the bounds, png and svg (`flowdup certify`)
embedding.*     a figure of the clients, png and svg (`embed_run`)
report.html     curves, metrics, settings
tensorboard/    the metrics for TensorBoard, if `run.log` names it (`tensorboard.py`)

Files are replaced as a whole, so that a process killed at any moment leaves the old one or the new
one; metrics.jsonl grows, and a last line that was never finished does not count.  A run begins with
the checkpoint of round 0: without a checkpoint, any other file says that one was lost.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowdup.certificate.stored import CERTIFICATE
from flowdup.checkpoint import BEST, CHECKPOINT, checkpoint_in, has_checkpoint
from flowdup.config import Config, read_config, read_toml
from flowdup.data import DataConfig
from flowdup.data.sources import SOURCES
from flowdup.errors import CheckpointError
from flowdup.files import cannot_write, sync_file, write_atomic
from flowdup.metrics_file import Row, list_ranges, missing_rounds, parse_metrics
from flowdup.report import RunContents, is_number
from flowdup.settings import Table, to_toml
from flowdup.strict_json import read_lenient_json

Metrics = Row  # of one round


@dataclass(frozen=True)
class RunFolder:
    """One run's files; none of them needs to exist."""

    path: Path

    @property
    def config(self) -> Path:
        """All settings, as TOML."""
        return self.path / "config.toml"

    @property
    def clients(self) -> Path:
        """Who takes part."""
        return self.path / "clients.json"

    @property
    def metrics(self) -> Path:
        """A line of JSON per round."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The folder of the last checkpoint."""
        return self.path / CHECKPOINT

    @property
    def best(self) -> Path:
        """The folder of the best round's checkpoint."""
        return self.path / BEST

    @property
    def kept(self) -> Path:
        """The checkpoint that counts: the best round's, or the last one's."""
        return checkpoint_in(self.path)

    @property
    def lock(self) -> Path:
        """Held by the process that trains."""
        return self.path / "lock"

    @property
    def evaluation(self) -> Path:
        """What `evaluate_run` found, as JSON."""
        return self.path / "evaluation.json"

    @property
    def certificate(self) -> Path:
        """What `certify_run` found, as JSON."""
        return self.path / CERTIFICATE

    @property
    def report(self) -> Path:
        """A page for people."""
        return self.path / "report.html"

    @property
    def embedding(self) -> Path:
        """Without an ending: there is one file of each kind."""
        return self.path / "embedding"

    @property
    def started(self) -> bool:
        """Whether there is something to continue."""
        return has_checkpoint(self.checkpoint)

    def check_not_damaged(self) -> None:
        """Refuse a folder that has lost its checkpoint: what it held must not be written over."""
        if self.started:
            return
        later = sorted(self.checkpoint.glob("round-[1-9]*.safetensors"))
        later += [self.best] if has_checkpoint(self.best) else []
        left = [p for p in (self.config, self.clients, self.metrics, *later) if p.exists()]
        if left:
            raise CheckpointError(
                f"{self.path} has {left[0].name} but no whole checkpoint: restore "
                f"{self.checkpoint} from a copy, or choose another folder"
            )

    def write_config(self, config: Config) -> None:
        """Store all settings."""
        write_atomic(self.config, to_toml(config).encode())

    def read_config(self) -> Config:
        """The stored settings; CheckpointError where there are none."""
        if not self.config.is_file():
            raise CheckpointError(f"{self.path} is not a run folder: it has no {self.config.name}")
        return read_stored(read_toml(self.config))

    def write_clients(self, listing: bytes) -> None:
        """Store who takes part."""
        write_atomic(self.clients, listing)

    def append_metrics(self, metrics: Metrics) -> None:
        """One line more, not yet surely on the disk: see `sync_metrics`."""
        try:
            with open(self.metrics, "a") as file:
                file.write(json.dumps(metrics) + "\n")
        except OSError as error:
            raise cannot_write(self.metrics, error) from error

    def sync_metrics(self) -> None:
        """Wait until the metrics are on the disk, before the checkpoint of their round is."""
        try:
            sync_file(self.metrics)
        except OSError as error:
            raise cannot_write(self.metrics, error) from error

    def read_metrics(self) -> list[Metrics]:
        """By rounds, one for each; of a round that was repeated, the later one."""
        rows, bad = parse_metrics(_read(self.metrics))
        if bad:
            raise CheckpointError(
                f"line {bad[0]} of {self.metrics} is not a round's metrics: remove this line"
            )
        return rows

    def cut_metrics(self, last: int) -> float:
        """Drop the lines of rounds after `last`; the seconds spent until then.

        A warning names rounds until `last` that have no line, or a damaged one at the end.
        """
        kept = [row for row in self.read_metrics() if row["round"] <= last]
        gaps = missing_rounds((row["round"] for row in kept), last)
        if gaps:
            warnings.warn(
                f"{self.metrics} has lost the metrics of rounds {list_ranges(gaps)}, which were "
                "trained: restore them from a copy, or go on without",
                stacklevel=3,
            )
        write_atomic(self.metrics, "".join(json.dumps(row) + "\n" for row in kept).encode())
        seconds = (row.get("seconds") for row in kept)
        return max((s for s in seconds if is_number(s) and s >= 0), default=0.0)

    def count_rounds(self) -> int:
        """How many lines metrics.jsonl has: cheap enough to ask again and again."""
        return _read(self.metrics).count(b"\n")

    def write_evaluation(self, result: dict[str, Any]) -> None:
        """Store what `evaluate_run` found."""
        write_atomic(self.evaluation, json.dumps(result, indent=2).encode())

    def write_certificate(self, result: dict[str, Any]) -> None:
        """Store what `certify_run` found."""
        write_atomic(self.certificate, json.dumps(result, indent=2).encode())

    def read_evaluation(self) -> dict[str, Any]:
        """What `evaluate_run` found, empty where there is no such file."""
        content = _read(self.evaluation)
        try:
            found = read_lenient_json(content) if content else {}
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.evaluation} is not an evaluation: evaluate the run again")
        return found

    def write_report(self, page: str) -> None:
        """Store the page."""
        write_atomic(self.report, page.encode())

    def read_all(self) -> RunContents:
        """All that a report tells, whatever of it is there and can be read."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"there is no run folder {self.path}: give the folder that a training wrote"
            )
        clients, bounds = (p.with_suffix(".svg") for p in (self.embedding, self.certificate))
        files = (self.config, self.metrics, self.evaluation, clients, self.certificate, bounds)
        return RunContents.read(self.path.resolve().name, *map(_read, files))


@dataclass(frozen=True)
class ComparisonFolder:
    """The files of a comparison: a run folder per variant and seed, two tables, and a page."""

    path: Path

    def run(self, variant: str, seed: int) -> RunFolder:
        """The folder of one run."""
        return RunFolder(self.path / variant / f"seed-{seed}")

    @property
    def results(self) -> Path:
        """A row for every run."""
        return self.path / "results.json"

    @property
    def summary(self) -> Path:
        """By variant, over seeds."""
        return self.path / "summary.json"

    @property
    def page(self) -> Path:
        """All of it for people."""
        return self.path / "comparison.html"

    def write_results(self, rows: list[dict[str, Any]]) -> None:
        """Store a row for every run."""
        write_atomic(self.results, json.dumps(rows, indent=2).encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Store figures by variant."""
        write_atomic(self.summary, json.dumps(summary, indent=2).encode())

    def write_page(self, page: str) -> None:
        """Store the page."""
        write_atomic(self.page, page.encode())


def read_stored(table: Table) -> Config:
    """A run's settings, which are all stored: one that is missing is younger than the run, and has
    the value with which the run goes on as it began.
    """
    data = table.get("data")
    if isinstance(data, Mapping) and "normalize" not in data:
        fixed = str(data.get("source", DataConfig.source)) in SOURCES  # mean and std are the set's
        table = {**table, "data": {**data, "normalize": fixed}}
    return read_config(table)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
