"""A run as one page that opens anywhere: no script, no font, no network."""

import base64
import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeGuard

from flowdup.errors import CheckpointError
from flowdup.files import write_atomic
from flowdup.report.chart import CHART_STYLE, histogram, line_chart

MOST_VALUES = 12  # a trait with more distinct values makes no table
KINDS = {  # of accuracy: a name, and what it means
    "transductive": ("transductive", "Models made from all of a client's points, scored on them."),
    "held_out": ("held out", "Models made from half of a client's points, scored on the rest."),
}

# Nothing may run or load, whatever a file of the run says.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --card: #fff; --ink: #1c1d1f; --soft: #62656b;
  --rule: #e6e6e3; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --page: #141517; --card: #1c1e21; --ink: #ececea;
  --soft: #a0a4ab; --rule: #33363b; --accent: #5ab4ea; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 40px 24px 64px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 10px; }
p { margin: 0; }
.soft, figcaption { color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 16px;
  margin: 28px 0; }
.empty { margin: 28px 0; }
.facts dt, .facts .soft { color: var(--soft); font-size: 13px; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.facts .figure { font-size: 24px; font-weight: 600; line-height: 1.3; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(420px, 100%), 1fr));
  gap: 16px; margin-bottom: 16px; }
.card, .facts > div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 16px 18px; margin: 0; min-width: 0; }
body > .card { margin-bottom: 16px; }
figcaption { font-size: 13px; margin-top: 8px; overflow-wrap: anywhere; }
svg, img { display: block; width: 100%; height: auto; overflow: visible; }
img { background: #fff; border-radius: 4px; padding: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 0 5px 12px; border-top: 1px solid var(--rule); }
th { font-weight: 400; color: var(--soft); font-size: 13px; }
thead th { border: 0; }
th:first-child { text-align: left; padding-left: 0; overflow-wrap: anywhere; }
tbody th { color: var(--ink); font-size: inherit; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font: 13px/1.5 ui-monospace, monospace; margin: 12px 0 0; }
"""


@dataclass(frozen=True)
class Run:
    """What a run folder holds; anything but the folder may be missing."""

    name: str
    config: str
    settings: dict[str, Any]
    metrics: list[dict[str, Any]]  # by rounds, one for each
    evaluation: dict[str, Any]
    embedding: bytes

    def curve(self, key: str) -> list[tuple[int, float]]:
        return [(row["round"], row[key]) for row in self.metrics if _finite(row.get(key))]

    def setting(self, table: str, key: str) -> str:
        inner = self.settings.get(table, {})
        return str(inner.get(key, "") if isinstance(inner, dict) else inner)


def write_report(folder: Path) -> Path:
    """Write report.html into a run folder, finished or not, and return its path.

    CheckpointError if the folder or a file in it cannot be read as what it should be.
    """
    run = read_run(folder)
    out = folder / "report.html"
    write_atomic(out, page(run).encode())
    return out


def read_run(folder: Path) -> Run:
    """Read whatever is there; a last line of metrics.jsonl that was never finished is left out."""
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no run folder {folder}: give the folder that a training wrote"
        )
    config = _read(folder / "config.toml").decode(errors="replace")
    try:
        settings = tomllib.loads(config)
    except tomllib.TOMLDecodeError as error:
        raise CheckpointError(
            f"{folder / 'config.toml'} is not TOML ({error}): restore or remove it"
        ) from error
    return Run(
        folder.resolve().name,
        config,
        settings,
        _read_metrics(folder / "metrics.jsonl"),
        _read_evaluation(folder / "evaluation.json"),
        _read(folder / "embedding.svg"),
    )


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    lines = [line for line in _read(path).split(b"\n") if line.strip()]
    rows: dict[int, dict[str, Any]] = {}
    for i, line in enumerate(lines):
        row = _json(line)
        if isinstance(row, dict) and isinstance(row.get("round"), int):
            rows[row["round"]] = row  # a resumed run may repeat a round: the later one counts
        elif i < len(lines) - 1:
            raise CheckpointError(
                f"line {i + 1} of {path} is not a round's metrics: remove this line"
            )
    return [rows[r] for r in sorted(rows)]


def _read_evaluation(path: Path) -> dict[str, Any]:
    data = _read(path)
    evaluation = _json(data) if data else {}
    if not isinstance(evaluation, dict):
        raise CheckpointError(f"{path} is not an evaluation: evaluate the run again")
    return evaluation


def _json(data: bytes) -> Any:
    """The value, or None if it is not JSON."""
    try:
        return json.loads(data)
    except ValueError:
        return None


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def page(run: Run) -> str:
    """The whole page; all that comes from the run's files is escaped."""
    body = [_headline(run), _curves(run), *_tests(run), _embedding(run), _config(run)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)} · flowdup</title>"
        f"<style>{STYLE}{CHART_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _headline(run: Run) -> str:
    method = str(run.evaluation.get("method") or run.setting("method", "name"))
    told = " on ".join(name for name in (method, run.setting("data", "source")) if name)
    facts = []
    if run.metrics:
        seconds = run.metrics[-1].get("seconds")
        took = f"in {_duration(seconds)}" if _finite(seconds) else ""
        facts.append(("Rounds", f"{run.metrics[-1]['round']:,}", took))
    if curve := run.curve("validation_accuracy"):
        first, best = max(curve, key=lambda point: point[1])
        note = f"best {_percent(best)} at round {first:,}"
        facts.append(("Validation accuracy", _percent(curve[-1][1]), note))
    accuracy, at = run.evaluation.get("accuracy") or {}, run.evaluation.get("round")
    note = f"{len(_clients(run))} clients" + (f", round {at:,}" if _finite(at) else "")
    for kind, (name, _) in KINDS.items():
        if _finite(value := accuracy.get(kind)):
            facts.append((f"Test accuracy, {name}", _percent(value), note))
    items = [
        f'<div><dt>{term}</dt><dd class="figure">{value}</dd><dd class="soft">{note}</dd></div>'
        for term, value, note in facts
    ]
    head = f'<h1>{escape(run.name)}</h1><p class="soft">{escape(told) or "A flowdup run"}</p>'
    if not items:
        return head + '<p class="empty">No round is finished: this run holds no results yet.</p>'
    return f'{head}<dl class="facts">{"".join(items)}</dl>'


def _curves(run: Run) -> str:
    if not run.metrics:
        return ""
    span = (run.metrics[0]["round"], run.metrics[-1]["round"])
    cards = []
    if loss := run.curve("loss"):
        noisy = len(loss) > 100
        note = "Faint: each round. Bold: running mean. " if noisy else ""
        if lost := len(run.metrics) - len(loss):
            note += f"In {lost} of {len(run.metrics)} rounds the loss was not finite."
        chart = line_chart(loss, span, "Training loss", trend=noisy)
        cards.append(_card("Training loss", chart, note))
    if accuracy := run.curve("validation_accuracy"):
        chart = line_chart(accuracy, span, "Validation accuracy", percent=True)
        cards.append(_card("Validation accuracy (%)", chart))
    return _cards(cards)


def _tests(run: Run) -> Iterable[str]:
    """Histograms of the test clients' accuracy, then a table for each trait that sorts them."""
    clients = _clients(run)
    yield _cards([_spread(clients, kind) for kind in KINDS if _accuracies(clients, kind)])
    traits = {name for client in clients for name in client.get("traits") or {}}
    yield _cards([table for name in sorted(traits) if (table := _by_trait(clients, name))])


def _clients(run: Run) -> list[dict[str, Any]]:
    return [c for c in run.evaluation.get("clients") or [] if isinstance(c, dict)]


def _accuracies(clients: Sequence[dict[str, Any]], kind: str) -> list[float]:
    return [client[kind] for client in clients if _finite(client.get(kind))]


def _spread(clients: Sequence[dict[str, Any]], kind: str) -> str:
    ranked = sorted((c for c in clients if _finite(c.get(kind))), key=lambda c: float(c[kind]))
    values = _accuracies(ranked, kind)
    ends = (ranked[0], ranked[-1])
    worst, best = (f"{_percent(c[kind])} ({escape(str(c['name']))})" for c in ends)
    name, meaning = KINDS[kind]
    note = f"Worst {worst}, median {_percent(median(values))}, best {best}. {meaning}"
    title = f"Test clients by accuracy, {name}"
    return _card(title, histogram(values, title), note)


def _by_trait(clients: Sequence[dict[str, Any]], trait: str) -> str:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for client in clients:
        value = (client.get("traits") or {}).get(trait)
        if value is not None:
            groups.setdefault(value, []).append(client)
    if not 1 < len(groups) <= MOST_VALUES:
        return ""
    kinds = [kind for kind in KINDS if _accuracies(clients, kind)]
    titles = [escape(trait), "clients", *(KINDS[kind][0] for kind in kinds)]
    heads = "".join(f'<th scope="col">{title}</th>' for title in titles)
    rows = []
    for value in sorted(groups, key=lambda v: (isinstance(v, str), v)):
        means = [_accuracies(groups[value], kind) for kind in kinds]
        cells = [str(len(groups[value])), *(_percent(fmean(m)) if m else "" for m in means)]
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{escape(str(value))}</th>{row}</tr>')
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return _card(f"Mean accuracy of clients by {escape(trait)}", f"<table>{body}</table>")


def _embedding(run: Run) -> str:
    if not run.embedding:
        return ""
    # An image, not part of the page: nothing inside it can run, load or clash.
    data = base64.b64encode(run.embedding).decode()
    image = f'<img alt="The clients in two dimensions" src="data:image/svg+xml;base64,{data}">'
    note = "Each mark is a client, placed by what the hypernetwork sees in its unlabeled data."
    return _card("Client embeddings r(X)", image, note)


def _config(run: Run) -> str:
    if not run.config:
        return ""
    text = f"<summary>Configuration</summary><pre>{escape(run.config)}</pre>"
    return f'<details class="card">{text}</details>'


def _cards(cards: Sequence[str]) -> str:
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _card(title: str, content: str, note: str = "") -> str:
    caption = f"<figcaption>{note}</figcaption>" if note else ""
    return f'<figure class="card"><h2>{title}</h2>{content}{caption}</figure>'


def _percent(value: float) -> str:
    return f"{value:.1f}&nbsp;%"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
