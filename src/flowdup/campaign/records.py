"""What runs gave, one JSON object a line, in a file that can be carried and merged.

A record needs no run folder: it has all settings, the accuracy on validation clients and, where
test clients were scored, their metrics.  Records are found by `identity` of their settings.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flowdup.campaign.cells import Run
from flowdup.campaign.identity import deciding_settings, identity
from flowdup.data import load_population
from flowdup.errors import CheckpointError, TrainingError
from flowdup.files import one_at_a_time, write_atomic
from flowdup.personalize import load
from flowdup.random import Stream
from flowdup.run import RunFolder
from flowdup.run.round_metrics import best_of, validated
from flowdup.settings import plain
from flowdup.strict_json import get_object, read_object

Record = dict[str, Any]


class Records:
    """Records by identity, in memory and in a file of JSON lines."""

    def __init__(self, path: Path, found: Iterable[Record] = ()) -> None:
        self.path = path
        self.by_digest: dict[str, Record] = {}
        for record in found:
            self.add(record)

    @classmethod
    def read(cls, path: Path) -> "Records":
        """Those of a file; none if there is no such file."""
        return cls(path, _read_lines(path) if path.exists() else ())

    def get(self, run: Run) -> Record | None:
        """What a run gave, or None if it is not recorded."""
        return self.by_digest.get(run.digest)

    def add(self, new: Record) -> None:
        """Take a record in; of two of one run, the parts of both, each as it was found first."""
        digest = identity(new["settings"])
        old = self.by_digest.get(digest)
        new = json.loads(json.dumps(new | {"digest": digest}, sort_keys=True))  # as from a file
        if old is None or ("failed" in old and "failed" not in new):
            self.by_digest[digest] = new
        elif "test" in new:  # one model has to have given all of it
            later = new | old | _joined_support(old, new)
            self.by_digest[digest] = later if "test" in old else new | _as_searched(old)

    def merge(self, others: Iterable["Records"]) -> int:
        """Take in other files' records; how many of them say something new."""
        before = dict(self.by_digest)
        for other in others:
            for record in other.by_digest.values():
                self.add(record)
        return sum(before.get(d) != record for d, record in self.by_digest.items())

    def save(self) -> None:
        """Write all of them, and what another process has written meanwhile."""
        with one_at_a_time(self.path.parent):
            self.merge([Records.read(self.path)])
            rows = sorted(self.by_digest.items())
            lines = (json.dumps(record, sort_keys=True) + "\n" for _, record in rows)
            write_atomic(self.path, "".join(lines).encode())


def search_accuracy(record: Record) -> float:
    """By which a setting is chosen: of its first run, though a later one was evaluated."""
    return float(record["searched" if "searched" in record else "validation"])


def _as_searched(old: Record) -> Record:
    """Kept of a run that was done again: on a GPU, up to rounding, another choice could follow."""
    return {} if "failed" in old else {"searched": search_accuracy(old)}


def _joined_support(old: Record, new: Record) -> Record:
    rows = {row["points"]: row for side in (new, old) for row in side.get("support", [])}
    return {"support": [rows[points] for points in sorted(rows)]} if rows else {}


def _read_lines(path: Path) -> Iterator[Record]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = read_object(line)
            get_object(record, "settings")
            if "failed" not in record and type(record.get("validation")) is not float:
                raise ValueError("it has no accuracy on validation clients")
            if "test" in record:
                _check_tested(record)
        except ValueError as error:
            raise CheckpointError(
                f"line {number} of {path} is no record of a run, {error}: restore the file"
            ) from None
        yield record


def _check_tested(record: Record) -> None:
    try:
        found = accuracies(record)
        whole = [found["accuracy"], found["worst_decile"]]
        halves = [found["held_out"], found["held_out_worst_decile"]]
        are_numbers = all(isinstance(number, int | float) for number in whole)
        # clients of a single point have no other half
        are_numbers &= all(
            isinstance(number, int | float | None)
            for number in (*halves, *by_support(record).values())
        )
    except (KeyError, TypeError):
        are_numbers = False
    if not are_numbers:
        raise ValueError("it has no accuracy on test clients")


def record_of(run: Run, folder: RunFolder, evaluated: bool, where: Record) -> Record:
    """Of a trained run, evaluated on test clients or not; `where` it was computed."""
    rows = folder.read_metrics()
    found = validated(rows, len(run.config.before))
    if not found:
        raise CheckpointError(
            f"{folder.path} has no accuracy on validation clients, by which settings are chosen: "
            "set data.validation_clients"
        )
    kept = found[-1] if run.config.run.keep == "last" else best_of(found)
    evaluation = folder.read_evaluation() if evaluated else {}
    if evaluation:
        kept = next((v for v in found if v.round == evaluation["round"]), kept)
        where = {key: evaluation[key] for key in ("device", "versions", "commit")}
    record = {
        "settings": deciding_settings(run.config),
        "engine": plain(run.config.engine),
        "round": kept.round,
        "rounds": run.config.rounds,
        "seconds": rows[-1]["seconds"],
        "validation": float(kept.accuracy),
        "validation_worst_decile": kept.worst_decile,
        **where,
    }
    return record | (_tested(evaluation) if evaluation else {})


def failed_record(run: Run, why: TrainingError, where: Record) -> Record:
    """Of a run that diverged: no setting to choose, and an outcome all the same."""
    return {
        "settings": deciding_settings(run.config),
        "engine": plain(run.config.engine),
        "failed": str(why),
        **where,
    }


def embeddings_of(folder: RunFolder, run: Run, by: str) -> Record:
    """r(X) of every validation client, with the trait that tells clients apart."""
    federation = load(folder.path)
    stream = Stream(run.config.seed).child("data")
    clients = load_population(run.config.data, stream).validation
    vectors = [federation.embedding(client.x).cpu().tolist() for client in clients]
    return {
        "by": by,
        "traits": [client.traits.get(by, "") for client in clients],
        "vectors": [[round(number, 5) for number in vector] for vector in vectors],
    }


def _tested(evaluation: dict[str, Any]) -> Record:
    readings = evaluation["metrics"]
    record: Record = {
        "k": evaluation["k"],
        "cost": evaluation["cost"],
        "test_clients": len(evaluation["clients"]),
        "test": readings,
    }
    if "support" in evaluation:
        record["support"] = evaluation["support"]
    return record


def by_support(record: Record) -> dict[int, float]:
    """Accuracy of models made from so many points each, where it was asked for."""
    rows = record.get("support", [])
    return {row["points"]: row["metrics"]["accuracy"]["mean"] for row in rows}


def accuracies(record: Record) -> dict[str, float]:
    """The measures of a table, of test clients, in percent."""
    whole, half = (record["test"][reading]["accuracy"] for reading in ("transductive", "held_out"))
    return {
        "accuracy": whole["mean"],
        "held_out": half["mean"],
        "worst_decile": whole["worst_decile"],
        "held_out_worst_decile": half["worst_decile"],
    }
