"""A run as one page that opens anywhere: no script, no font, no network."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from statistics import fmean, median
from typing import Any

from flowdup.evaluation import METRICS, READINGS, Metric
from flowdup.report.chart import CHART_STYLE, histogram, line_chart
from flowdup.report.contents import RunContents, is_number

MOST_VALUES = 12  # a trait with more distinct values makes no table
NAMES = {"transductive": "transductive", "held_out": "held out"}
MEANINGS = {
    "transductive": "Models made from all of a client's points, scored on them.",
    "held_out": "Models made from half of a client's points, scored on the rest.",
}
SPOKEN = {"nll": "negative log-likelihood", "macro_f1": "macro-F1"}
COLUMNS = {"mean": "mean", "std": "deviation", "worst_decile": "worst decile", "worst": "worst"}

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
.problems ul { margin: 0; padding-left: 20px; overflow-wrap: anywhere; }
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


def page(run: RunContents) -> str:
    """The whole page; all that comes from the run's files is escaped, and can be encoded."""
    body = [
        _headline(run),
        _problems(run),
        _curves(run),
        *_tests(run),
        _embedding(run),
        _config(run),
    ]
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)} · flowdup</title>"
        f"<style>{STYLE}{CHART_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )
    return text.encode(errors="replace").decode()  # halves of letters from JSON


def _headline(run: RunContents) -> str:
    method = str(run.evaluation.get("method") or run.setting("method", "name"))
    text = " on ".join(name for name in (method, run.setting("data", "source")) if name)
    facts = []
    if run.metrics:
        seconds = run.metrics[-1].get("seconds")
        took = f"in {_duration(seconds)}" if is_number(seconds) else ""
        facts.append(("Rounds", f"{run.metrics[-1]['round']:,}", took))
    if curve := run.curve("validation_accuracy"):
        first, best = max(curve, key=lambda point: point[1])
        note = f"best {_percent(best)} at round {first:,}"
        facts.append(("Validation accuracy", _percent(curve[-1][1]), note))
    at = run.evaluation.get("round")
    tested = f"{len(_clients(run))} clients" + (f", round {at:,}" if is_number(at) else "")
    for reading in READINGS:
        found = run.summary(reading, "accuracy")
        if "mean" in found:
            worst = found.get("worst_decile")
            note = f"worst decile {_percent(worst)}; {tested}" if worst is not None else tested
            facts.append((f"Test accuracy, {NAMES[reading]}", _percent(found["mean"]), note))
    items = [
        f'<div><dt>{term}</dt><dd class="figure">{value}</dd><dd class="soft">{note}</dd></div>'
        for term, value, note in facts
    ]
    head = f'<h1>{escape(run.name)}</h1><p class="soft">{escape(text) or "A flowdup run"}</p>'
    if not items:
        return head + '<p class="empty">No round is finished: this run holds no results yet.</p>'
    return f'{head}<dl class="facts">{"".join(items)}</dl>'


def _problems(run: RunContents) -> str:
    items = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems)
    return (
        f'<div class="card problems"><h2>Not readable</h2><ul>{items}</ul></div>' if items else ""
    )


def _curves(run: RunContents) -> str:
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
        last = run.curve("validation_worst_decile")[-1:]
        note = "".join(f"Worst decile of clients: {_percent(v)} at round {r:,}." for r, v in last)
        cards.append(_card("Validation accuracy (%)", chart, note))
    return _cards(cards)


def _tests(run: RunContents) -> Iterable[str]:
    """The test clients' metrics, histograms of their accuracy, and a table for each trait that
    sorts them.
    """
    yield _cards([table for reading in READINGS if (table := _metrics(run, reading))])
    clients = _clients(run)
    yield _cards([_spread(clients, r) for r in READINGS if _accuracies(clients, r)])
    traits = {name for client in clients for name in client["traits"]}
    yield _cards([table for name in sorted(traits) if (table := _by_trait(clients, name))])


def _metrics(run: RunContents, reading: str) -> str:
    """Every metric over test clients: the mean, and how those fare who fare worst."""
    rows = []
    for name in run.evaluation.get("metrics", {}).get(reading, {}):
        metric, found = METRICS.get(name), run.summary(reading, name)
        if found:
            cells = [f"{found[key]:.{_digits(metric)}f}" if key in found else "" for key in COLUMNS]
            rows.append((_label(name, metric), cells))
    if not rows:
        return ""
    note = (
        f"Over clients, each counted once; the worst are those by each metric. {MEANINGS[reading]}"
    )
    title = f"Metrics of test clients, {NAMES[reading]}"
    return _card(title, _table(["", *COLUMNS.values()], rows), note)


def _label(name: str, metric: Metric | None) -> str:
    """A metric's name for people, with its unit and its direction where they are known."""
    unit = metric.unit if metric else ""
    lower = "lower is better" if metric and not metric.higher_is_better else ""
    text = ", ".join(filter(None, (unit, lower)))
    return SPOKEN.get(name, name.replace("_", " ")) + (f" ({text})" if text else "")


def _digits(metric: Metric | None) -> int:
    return 1 if metric is not None and metric.unit == "%" else 3


def _clients(run: RunContents) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.evaluation.get("clients", [])
    return found


def _accuracy(client: dict[str, Any], reading: str) -> float | None:
    value: float | None = client["metrics"][reading]["accuracy"]
    return value


def _accuracies(clients: Sequence[dict[str, Any]], reading: str) -> list[float]:
    return [v for client in clients if (v := _accuracy(client, reading)) is not None]


def _spread(clients: Sequence[dict[str, Any]], reading: str) -> str:
    known = [(v, c) for c in clients if (v := _accuracy(c, reading)) is not None]
    ranked = sorted(known, key=lambda pair: pair[0])
    values = [value for value, _ in ranked]
    worst, best = (f"{_percent(v)} ({escape(str(c['name']))})" for v, c in (ranked[0], ranked[-1]))
    note = f"Worst {worst}, median {_percent(median(values))}, best {best}. {MEANINGS[reading]}"
    title = f"Test clients by accuracy, {NAMES[reading]}"
    return _card(title, histogram(values, title), note)


def _by_trait(clients: Sequence[dict[str, Any]], trait: str) -> str:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for client in clients:
        value = client["traits"].get(trait)
        if value is not None:
            groups.setdefault(value, []).append(client)
    if not 1 < len(groups) <= MOST_VALUES:
        return ""
    readings = [reading for reading in READINGS if _accuracies(clients, reading)]
    rows = []
    for value in sorted(groups, key=lambda v: (isinstance(v, str), v)):
        found = [_accuracies(groups[value], reading) for reading in readings]
        cells = [str(len(groups[value])), *(_percent(fmean(f)) if f else "" for f in found)]
        rows.append((str(value), cells))
    titles = [trait, "clients", *(NAMES[reading] for reading in readings)]
    return _card(f"Mean accuracy of clients by {escape(trait)}", _table(titles, rows))


def _table(titles: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Titles and the names of rows are escaped here; cells are HTML."""
    heads = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    lines = []
    for name, cells in rows:
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{row}</tr>')
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _embedding(run: RunContents) -> str:
    if not run.embedding:
        return ""
    # An image, not part of the page: nothing inside it can run, load or clash.
    data = base64.b64encode(run.embedding).decode()
    image = f'<img alt="The clients in two dimensions" src="data:image/svg+xml;base64,{data}">'
    note = "Each mark is a client, placed by what the hypernetwork sees in its unlabeled data."
    return _card("Client embeddings r(X)", image, note)


def _config(run: RunContents) -> str:
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
