"""A run as one page (`parts.py`)."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from statistics import fmean, median
from typing import Any

from flowdup.data import MEMORY
from flowdup.evaluation import READINGS
from flowdup.metrics import METRICS, Metric
from flowdup.report.chart import histogram, line_chart
from flowdup.report.contents import Certificate, RunContents, is_number
from flowdup.report.parts import (
    card,
    card_grid,
    document,
    duration,
    footer,
    html_table,
    percent,
    provenance_text,
)

MOST_VALUES = 12  # a trait with more distinct values makes no table
NAMES = {"transductive": "transductive", "held_out": "held out"}
MEANINGS = {
    "transductive": "Models made from all of a client's points, scored on them.",
    "held_out": "Models made from half of a client's points, scored on the rest.",
}
SPOKEN = {"nll": "negative log-likelihood", "macro_f1": "macro-F1"}
COLUMNS = {"mean": "mean", "std": "deviation", "worst_decile": "worst decile", "worst": "worst"}


def page(run: RunContents, psi_sha256: str = "") -> str:
    """The whole page; all that comes from the run's files is escaped, and can be encoded.

    `psi_sha256` is of the model that counts, by which a certificate knows whose it is.
    """
    body = [
        _headline(run),
        _problems(run),
        _curves(run),
        *_tests(run),
        _certificate(run, psi_sha256),
        _embedding(run),
        _config(run),
        footer(provenance_text(run.evaluation)),
    ]
    return document(run.name, body)


def _headline(run: RunContents) -> str:
    method = str(run.evaluation.get("method") or run.setting("method", "name"))
    source = run.setting("data", "source")
    source = "clients given in Python" if source == MEMORY else source
    text = " on ".join(name for name in (method, source) if name)
    facts = []
    if run.metrics:
        seconds = run.metrics[-1].get("seconds")
        took = f"in {duration(seconds)}" if is_number(seconds) else ""
        facts.append(("Rounds", f"{run.metrics[-1]['round']:,}", took))
    if curve := run.last_stage():
        first, best, _ = max(curve, key=lambda point: (point[1], -point[2]))
        note = f"best {percent(best)} at round {first:,}"
        facts.append(("Validation accuracy", percent(curve[-1][1]), note))
    facts += _guard_facts(run)
    at = run.evaluation.get("round")
    tested = f"{_count(_clients(run))} clients" + (f", round {at:,}" if is_number(at) else "")
    for reading in READINGS:
        found = run.summary(reading, "accuracy")
        if "mean" in found:
            worst = found.get("worst_decile")
            note = f"worst decile {percent(worst)}; {tested}" if worst is not None else tested
            facts.append((f"Test accuracy, {NAMES[reading]}", percent(found["mean"]), note))
    items = [
        f'<div><dt>{term}</dt><dd class="figure">{value}</dd><dd class="soft">{note}</dd></div>'
        for term, value, note in facts
    ]
    head = f'<h1>{escape(run.name)}</h1><p class="soft">{escape(text) or "A flowdup run"}</p>'
    if not items:
        return head + '<p class="empty">No round is finished: this run holds no results yet.</p>'
    return f'{head}<dl class="facts">{"".join(items)}</dl>'


def _guard_facts(run: RunContents) -> list[tuple[str, str, str]]:
    """Privacy, bytes between machines, and replies that were left out, where a run has them."""
    facts = []
    if spent := run.curve("epsilon"):
        facts.append(("Epsilon", f"{spent[-1][1]:.3g}", "user-level, see server.privacy"))
    for key, way in (("bytes_up_per_client", "up"), ("bytes_down_per_client", "down")):
        if sizes := [size for _, size in run.curve(key)]:
            mean = sum(sizes) / len(sizes) / 1e6
            facts.append((f"MB {way}", f"{mean:,.3f}", "per client and round, as sent"))
    if refused := [(round, count) for round, count in run.curve("refused") if count]:
        total = sum(count for _, count in refused)
        facts.append(("Refused replies", f"{total:,}", f"in {len(refused):,} rounds"))
    return facts


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
        cards.append(card("Training loss", chart, note))
    if accuracy := run.curve("validation_accuracy"):
        chart = line_chart(accuracy, span, "Validation accuracy", percent=True)
        last = run.curve("validation_worst_decile")[-1:]
        note = "".join(f"Worst decile of clients: {percent(v)} at round {r:,}." for r, v in last)
        cards.append(card("Validation accuracy (%)", chart, note))
    return card_grid(cards)


def _tests(run: RunContents) -> Iterable[str]:
    """The test clients' metrics, histograms of their accuracy, and a table for each trait that
    sorts them.
    """
    yield card_grid([table for reading in READINGS if (table := _metrics(run, reading))])
    clients = _clients(run)
    yield card_grid([_spread(clients, r) for r in READINGS if _accuracies(clients, r)])
    traits = {name for client in clients for name in client["traits"]}
    yield card_grid([table for name in sorted(traits) if (table := _by_trait(clients, name))])


def _metrics(run: RunContents, reading: str) -> str:
    """Every metric over test clients: the mean, and how those fare who fare worst."""
    rows = []
    for name in run.evaluation.get("metrics", {}).get(reading, {}):
        metric, found = METRICS.get(name), run.summary(reading, name)
        if found:
            cells = [
                f"{found[key]:.{metric_digits(metric)}f}" if key in found else "" for key in COLUMNS
            ]
            rows.append((metric_label(name, metric), cells))
    if not rows:
        return ""
    note = (
        f"Over clients, each counted once; the worst are those by each metric. {MEANINGS[reading]}"
    )
    title = f"Metrics of test clients, {NAMES[reading]}"
    return card(title, html_table(["", *COLUMNS.values()], rows), note)


def metric_label(name: str, metric: Metric | None) -> str:
    """A metric's name for people, with its unit and its direction where they are known."""
    unit = metric.unit if metric else ""
    lower = "lower is better" if metric and not metric.higher_is_better else ""
    text = ", ".join(filter(None, (unit, lower)))
    return SPOKEN.get(name, name.replace("_", " ")) + (f" ({text})" if text else "")


def metric_digits(metric: Metric | None) -> int:
    """How many decimals a metric is shown with."""
    return 1 if metric is not None and metric.unit == "%" else 3


def _clients(run: RunContents) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.evaluation.get("clients", [])
    return found


def _accuracy(client: dict[str, Any], reading: str) -> float | None:
    value: float | None = client["metrics"][reading]["accuracy"]
    return value


def _accuracies(clients: Sequence[dict[str, Any]], reading: str) -> list[float]:
    return [v for client in clients if (v := _accuracy(client, reading)) is not None]


def _count(clients: Sequence[dict[str, Any]]) -> str:
    """How many are scored, and of how many where some have no labels."""
    scored = sum(any(_accuracy(c, r) is not None for r in READINGS) for c in clients)
    return str(scored) if scored == len(clients) else f"{scored} of {len(clients)}"


def _spread(clients: Sequence[dict[str, Any]], reading: str) -> str:
    known = [(v, c) for c in clients if (v := _accuracy(c, reading)) is not None]
    ranked = sorted(known, key=lambda pair: pair[0])
    values = [value for value, _ in ranked]
    worst, best = (f"{percent(v)} ({escape(str(c['name']))})" for v, c in (ranked[0], ranked[-1]))
    note = f"Worst {worst}, median {percent(median(values))}, best {best}. {MEANINGS[reading]}"
    title = f"Test clients by accuracy, {NAMES[reading]}"
    return card(title, histogram(values, title), note)


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
        cells = [_count(groups[value]), *(percent(fmean(f)) if f else "" for f in found)]
        rows.append((str(value), cells))
    titles = [trait, "clients", *(NAMES[reading] for reading in readings)]
    return card(f"Mean accuracy of clients by {escape(trait)}", html_table(titles, rows))


def _certificate(run: RunContents, psi_sha256: str) -> str:
    """How wrong models of clients without labels may be."""
    if not run.certificate.rows:
        return ""
    columns = {
        "bound": "at most",
        "empirical_risk": "starts from",
        "measured_error_unlabeled": "measured",
    }
    rows = []
    for row in run.certificate.rows:
        values = (row[key] for key in columns)
        cells = ["" if value is None else f"{value:.3f}" for value in values]
        rows.append((row["route"], [*cells, escape(row["refused"] or row["assumes"])]))
    deltas = [r["delta"] for r in run.certificate.rows if r["delta"] is not None]
    confidence = f"{1 - max(deltas, default=1.0):.0%}"
    note = (
        f"Each with confidence {confidence} by itself, not all together. A bound of 1 or more says "
        "nothing. Prediction sets: the share of points whose class is not in its set."
    )
    titles = ["", *columns.values(), "assumes"]
    alt = "Bounds against the number of clients set aside, and against p"
    figure = _image(run.bounds, alt) if run.bounds else ""
    content = _certified(run.certificate, psi_sha256) + html_table(titles, rows) + figure
    return card("Error of clients without labels", content, note)


def _certified(found: Certificate, psi_sha256: str) -> str:
    """Of which model the bounds are."""
    model = "the model" if found.round is None else f"the model after round {found.round:,}"
    if not (found.psi_sha256 and psi_sha256):
        return f"<p>Of {model}; whether it is the one that counts is not known.</p>"
    if found.psi_sha256 == psi_sha256:
        return f"<p>Of {model}.</p>"
    warning = "These bounds are not of the model that counts now"
    return f"<p><strong>{warning}</strong>, but of {model}: run `flowdup certify` again.</p>"


def _embedding(run: RunContents) -> str:
    if not run.embedding:
        return ""
    image = _image(run.embedding, "The clients in two dimensions")
    note = "Each mark is a client, placed by what the hypernetwork sees in its unlabeled data."
    return card("Client embeddings r(X)", image, note)


def _image(svg: bytes, alt: str) -> str:
    """An image, not part of the page: nothing inside it can run, load or clash."""
    return f'<img alt="{alt}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'


def _config(run: RunContents) -> str:
    if not run.config:
        return ""
    text = f"<summary>Configuration</summary><pre>{escape(run.config)}</pre>"
    return f'<details class="card">{text}</details>'
