"""What a run folder's files say, as far as they can be read: the rest is named and left out.

Nothing here raises: a report is also for a run that went wrong.  What remains has known types and
numbers that a chart can hold.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

from flowdup.config import parse_toml
from flowdup.errors import shorten
from flowdup.evaluation import READINGS
from flowdup.metrics_file import Row, list_ranges, missing_rounds, parse_metrics
from flowdup.strict_json import read_lenient_json

_LARGEST = 1e100  # of a number that is drawn
_MOST_FIGURE = 2**26  # bytes
_AGAIN = "run `flowdup evaluate` again"
_ERRORS = ("empirical_risk", "measured_error_unlabeled")


@dataclass(frozen=True)
class Certificate:
    """Bounds on clients' errors, and of which model they are."""

    rows: tuple[Row, ...] = ()
    round: float | None = None
    psi_sha256: str = ""


@dataclass(frozen=True)
class RunContents:
    """What a run folder holds; anything but its name may be empty."""

    name: str
    config: str
    settings: dict[str, Any]
    metrics: list[Row]  # by rounds, one for each
    evaluation: dict[str, Any]
    embedding: bytes
    certificate: Certificate = Certificate()
    bounds: bytes = b""  # a figure of them
    problems: tuple[str, ...] = ()  # what could not be read, a sentence each

    @classmethod
    def read(
        cls,
        name: str,
        config: bytes,
        metrics: bytes,
        evaluation: bytes,
        embedding: bytes,
        certificate: bytes = b"",
        bounds: bytes = b"",
    ) -> "RunContents":
        """From the contents of config.toml, metrics.jsonl, evaluation.json, embedding.svg,
        certificate.json and certificate.svg, empty where there is no such file.
        """
        problems: list[str] = []
        text = config.decode(errors="replace")
        return cls(
            name,
            text,
            _settings(text, problems),
            _metrics(metrics, problems),
            _evaluation(evaluation, problems),
            _figure(embedding, "embedding.svg", "embed", problems),
            _certificate(certificate, problems),
            _figure(bounds, "certificate.svg", "certify", problems),
            tuple(problems),
        )

    def curve(self, key: str) -> list[tuple[int, float]]:
        """A metric by rounds, where it was measured."""
        return [(row["round"], row[key]) for row in self.metrics if is_number(row.get(key))]

    def last_stage(self) -> list[tuple[int, float, float]]:
        """Accuracy and loss (infinite if not told) on validation clients in the last stage, by
        round: what is kept is one of these.  First what the stage began from, if it was evaluated.
        """
        stage = self.metrics[-1].get("stage", 0) if self.metrics else 0
        return [
            (row["round"] - earlier, row[f"{when}_accuracy"], row.get(f"{when}_loss", math.inf))
            for row in self.metrics
            if row.get("stage", 0) == stage
            for when, earlier in (("start", 1), ("validation", 0))
            if is_number(row.get(f"{when}_accuracy"))
        ]

    def summary(self, reading: str, metric: str) -> dict[str, float]:
        """What is known of a metric over test clients: mean, std, worst_decile, worst."""
        found = self.evaluation.get("metrics", {}).get(reading, {}).get(metric, {})
        return {n: v for n, v in found.items() if is_number(v)}

    def setting(self, table: str, key: str) -> str:
        """A setting for people; empty where it is not known."""
        inner = self.settings.get(table, {})
        return str(inner.get(key, "") if isinstance(inner, dict) else inner)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value can be drawn."""
    return type(value) in (int, float) and abs(value) <= _LARGEST and math.isfinite(value)


def _settings(text: str, problems: list[str]) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        problems.append(f"config.toml is not TOML ({shorten(error, 200)}): restore it")
        return {}


def _metrics(content: bytes, problems: list[str]) -> list[Row]:
    rows, bad = parse_metrics(content)
    if bad:
        some = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        problems.append(f"metrics.jsonl has {len(bad)} unreadable lines ({some}): restore it")
    if rows and (gaps := missing_rounds((row["round"] for row in rows), rows[-1]["round"])):
        problems.append(f"metrics.jsonl has lost rounds {list_ranges(gaps)}: restore it")
    return rows


def _evaluation(content: bytes, problems: list[str]) -> dict[str, Any]:
    """Only what is known and of the right type."""
    if not content:
        return {}
    try:
        found = read_lenient_json(content)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        problems.append(f"evaluation.json is unreadable ({shorten(error, 200)}): {_AGAIN}")
        return {}
    cleaner = _Cleaner()
    clean: dict[str, Any] = {
        "metrics": {
            reading: {name: cleaner.table(summary) for name, summary in table.items()}
            for reading, table in cleaner.readings(found.get("metrics")).items()
        },
        "clients": [cleaner.client(c) for c in cleaner.list(found.get("clients"))],
    }
    if "method" in found:
        clean["method"] = cleaner.text(found["method"])
    clean["versions"] = {
        cleaner.text(n): cleaner.text(v) for n, v in cleaner.table(found.get("versions")).items()
    }
    for name in ("commit", "device"):
        clean[name] = cleaner.text(found.get(name))
    if cleaner.number(found.get("round")) is not None:
        clean["round"] = found["round"]
    if cleaner.dropped:
        problems.append(f"evaluation.json has values that make no sense, left out here: {_AGAIN}")
    return clean


def _certificate(content: bytes, problems: list[str]) -> Certificate:
    """Its rows, each with texts and numbers only."""
    if not content:
        return Certificate()
    cleaner = _Cleaner()
    try:
        found = read_lenient_json(content)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        problems.append(
            f"certificate.json is unreadable ({shorten(error, 200)}): run `flowdup certify` again"
        )
        return Certificate()
    texts, numbers = ("route", "data", "assumes", "refused"), ("bound", "delta", *_ERRORS)
    rows = tuple(
        {n: cleaner.text(row.get(n)) for n in texts}
        | {n: cleaner.number(row.get(n)) for n in numbers}
        for row in map(cleaner.table, cleaner.list(found.get("certificate")))
    )
    round, psi_sha256 = cleaner.number(found.get("round")), cleaner.text(found.get("psi_sha256"))
    if cleaner.dropped:
        problems.append("certificate.json has values that make no sense, left out here")
    return Certificate(rows, round, psi_sha256)


class _Cleaner:
    """Takes values of the right types and counts the others; None is right everywhere."""

    def __init__(self) -> None:
        self.dropped = 0

    def table(self, value: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._keep(value, dict, {})
        return found

    def list(self, value: Any) -> list[Any]:
        found: list[Any] = self._keep(value, list, [])
        return found

    def text(self, value: Any) -> str:
        found: str = self._keep(value, str, "")
        return found

    def number(self, value: Any) -> float | None:
        if value is None or is_number(value):
            return value
        self.dropped += 1
        return None

    def readings(self, value: Any) -> dict[str, dict[str, Any]]:
        table = self.table(value)
        return {reading: self.table(table.get(reading)) for reading in READINGS}

    def client(self, value: Any) -> Row:
        table = self.table(value)
        traits = self.table(table.get("traits"))
        kept = {n: v for n, v in traits.items() if isinstance(v, str) or is_number(v)}
        self.dropped += len(traits) - len(kept)
        accuracies = {}
        for reading, own in self.readings(table.get("metrics")).items():
            accuracy = self.number(own.get("accuracy"))
            if accuracy is not None and not 0 <= accuracy <= 100:
                self.dropped, accuracy = self.dropped + 1, None
            accuracies[reading] = {"accuracy": accuracy}
        return {"name": self.text(table.get("name")), "traits": kept, "metrics": accuracies}

    def _keep(self, value: Any, kind: type[Any], empty: Any) -> Any:
        if isinstance(value, kind):
            return value
        self.dropped += value is not None
        return empty


def _figure(content: bytes, name: str, command: str, problems: list[str]) -> bytes:
    if not content:
        return b""
    whole = b"<svg" in content[:4096] and content.rstrip().endswith(b"</svg>")
    if whole and len(content) <= _MOST_FIGURE:
        return content
    problems.append(f"{name} is not a whole figure: run `flowdup {command}` again")
    return b""
