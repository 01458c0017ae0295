"""A comparison as one page (`parts.py`): methods by seeds, paired differences, cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, stdev
from typing import Any

from flowdup.evaluation import READINGS
from flowdup.metrics import METRICS
from flowdup.report.chart import Interval, Series, interval_chart, series_chart, stroke
from flowdup.report.contents import RunContents, is_number
from flowdup.report.html import NAMES, metric_digits, metric_label
from flowdup.report.parts import (
    card,
    card_grid,
    document,
    duration,
    footer,
    html_table,
    provenance_text,
)

MOST_CURVES = 12
NORMAL_95 = 1.96  # standard errors to either side
DASH = "-"
COST = {  # column: (title, divisor, digits)
    "parameters": ("numbers trained", 1, 0),
    "bytes_down": ("MB down", 1e6, 2),
    "bytes_up": ("MB up", 1e6, 2),
    "train_flops": ("GFLOP to train", 1e9, 3),
    "personalize_flops": ("GFLOP to make a model", 1e9, 3),
}


@dataclass(frozen=True)
class ComparedRun:
    """One variant with one seed."""

    row: dict[str, Any]  # as `run.comparison.collect` makes it
    contents: RunContents
    clients: str  # a digest of the test clients; empty if they are unknown

    def accuracies(self, reading: str) -> list[float | None]:
        """Of every test client."""
        found = self.contents.evaluation.get("clients", [])
        return [client["metrics"][reading]["accuracy"] for client in found]


@dataclass(frozen=True)
class ComparedVariant:
    """A variant of a comparison, with its runs."""

    label: str
    runs: Sequence[ComparedRun]  # by seeds, at least one

    def values(self, key: str) -> dict[int, float]:
        """A column's numbers by seed, where they are known."""
        return {r.row["seed"]: r.row[key] for r in self.runs if is_number(r.row.get(key))}


@dataclass(frozen=True)
class Difference:
    """Of two variants at the same test clients, the mean over clients, in points of accuracy.

    The error is that of the mean over clients, given the trained models; how much another seed
    would change it, only the seeds tell.
    """

    mean: float
    error: float | None  # standard; None where there are too few clients
    seeds: Sequence[float]
    clients: int


def paired(first: ComparedVariant, other: ComparedVariant, reading: str) -> Difference | None:
    """`other` minus `first` by clients, for the seeds that both have; None without such pairs."""
    means, variances, clients = [], [], 0
    theirs = {run.row["seed"]: run for run in other.runs}
    for run in first.runs:
        match = theirs.get(run.row["seed"])
        if match is None or not run.clients or run.clients != match.clients:
            continue
        both = zip(match.accuracies(reading), run.accuracies(reading), strict=False)
        found = [a - b for a, b in both if a is not None and b is not None]
        if found:
            means.append(fmean(found))
            clients += len(found)
            if len(found) > 1:
                variances.append(stdev(found) ** 2 / len(found))
    if not means:
        return None
    whole = len(variances) == len(means)
    error = math.sqrt(sum(variances)) / len(means) if whole else None
    return Difference(fmean(means), error, means, clients)


def comparison_page(name: str, variants: Sequence[ComparedVariant], missing: Sequence[str]) -> str:
    """The whole page; `missing` names runs without results.  All texts are escaped."""
    body = [_headline(name, variants, missing)]
    if variants:
        body += [
            _accuracy_table(variants),
            card_grid([_by_seeds(variants), _curves(variants)]),
            card_grid([c for reading in READINGS if (c := _differences(variants, reading))]),
            _other_metrics(variants),
            _cost(variants),
        ]
    made = dict.fromkeys(provenance_text(r.row) for v in variants for r in v.runs)
    return document(name, [*body, footer("; ".join(filter(None, made)))])


def _headline(name: str, variants: Sequence[ComparedVariant], missing: Sequence[str]) -> str:
    rows = [run.row for variant in variants for run in variant.runs]
    data = ", ".join(sorted({str(row.get("data", "")) for row in rows}))
    seeds = len({row["seed"] for row in rows})
    told = f"{_count(len(variants), 'variant')}, {_count(seeds, 'seed')}"
    head = f'<h1>{escape(name)}</h1><p class="soft">{escape(f"{told}, on {data}")}</p>'
    if not variants:
        head = f'<h1>{escape(name)}</h1><p class="empty">No run is finished and evaluated yet.</p>'
    if missing:
        runs = escape(", ".join(missing))
        head += f'<p class="soft">Without results so far: {runs}.</p>'
    return f"<header>{head}</header>"


def _accuracy_table(variants: Sequence[ComparedVariant]) -> str:
    seeds = list(dict.fromkeys(r.row["seed"] for v in variants for r in v.runs))
    several = len(seeds) > 1
    titles = ["", "all", *([f"seed {seed}" for seed in seeds] if several else [])]
    titles += ["worst decile", "held out", "held out, worst decile"]
    rows = []
    for variant in variants:
        by_seed = variant.values("accuracy")
        cells = [spread_text(list(by_seed.values()))]
        if several:
            cells += [f"{by_seed[s]:.1f}" if s in by_seed else DASH for s in seeds]
        for key in ("worst_decile", "held_out", "held_out_worst_decile"):
            cells.append(spread_text(list(variant.values(key).values())))
        rows.append((variant.label, cells))
    over = "Mean ± deviation over seeds. " if several else "One seed. "
    note = (
        f"{over}The worst decile is the tenth of the clients that fare worst. Models are made from "
        "all of a client's unlabeled points and scored on them; held out: made from one half and "
        "scored on the other."
    )
    return card("Accuracy of unlabeled test clients (%)", html_table(titles, rows), note)


def spread_text(values: Sequence[float]) -> str:
    """The mean, and the deviation if there are several values."""
    if not values:
        return DASH
    mean = f"{fmean(values):.1f}"
    return f"{mean} ± {stdev(values):.1f}" if len(values) > 1 else mean


def _by_seeds(variants: Sequence[ComparedVariant]) -> str:
    rows = []
    for variant in variants:
        values = list(variant.values("accuracy").values())
        if values:
            parts = values if len(values) > 1 else ()
            rows.append(
                Interval(variant.label, fmean(values), None, f"{fmean(values):.1f} %", parts)
            )
    if not rows:
        return ""
    several = any(row.parts for row in rows)
    note = "Small: each seed. Large: their mean." if several else ""
    chart = interval_chart(rows, "Accuracy by method", "accuracy (%)")
    return card("Accuracy by method and seed", chart, note)


def _curves(variants: Sequence[ComparedVariant]) -> str:
    series = []
    for variant in variants:
        curves = [c for r in variant.runs if (c := r.contents.curve("validation_accuracy"))]
        if curves and (one := Series(variant.label, curves)).mean:
            series.append(one)
    if not series:
        return ""
    shown = series[:MOST_CURVES]
    legend = "".join(
        f'<li><svg viewBox="0 0 24 8"><line class="series" {stroke(number)} x1="0" x2="24" y1="4" '
        f'y2="4"/></svg>{escape(one.name)}</li>'
        for number, one in enumerate(shown)
    )
    chart = series_chart(shown, "Validation accuracy")
    note = "Bold: mean over seeds. Faint: each seed. " if len(shown[0].seeds) > 1 else ""
    if len(series) > len(shown):
        note += f"The first {len(shown)} of {len(series)} variants."
    content = f'{chart}<ul class="legend">{legend}</ul>'
    return card("Validation accuracy while training (%)", content, note)


def _differences(variants: Sequence[ComparedVariant], reading: str) -> str:
    """Every variant against the first, at the same clients."""
    first, *others = variants
    found = [(other, d) for other in others if (d := paired(first, other, reading))]
    if not found:
        return ""
    rows = [
        Interval(
            other.label,
            d.mean,
            None if d.error is None else NORMAL_95 * d.error,
            difference_text(d),
            d.seeds if len(d.seeds) > 1 else (),
        )
        for other, d in found
    ]
    name = f"Difference to {first.label} at the same clients, {NAMES[reading]}"
    seeds = "Small: each seed. " if any(row.parts for row in rows) else ""
    lost = len(others) - len(found)
    note = (
        f"Points of accuracy against {escape(first.label)}, the first variant: mean ± standard "
        f"error over {max(d.clients for _, d in found):,} pairs of the same client; bars: 95 %. "
        f"{seeds}"
        "The error is over clients, given the trained models."
        + (f" {_count(lost, 'variant')} had other clients." if lost else "")
    )
    chart = interval_chart(rows, name, "points of accuracy", zero=True)
    return card(escape(name), chart, note)


def difference_text(difference: Difference) -> str:
    """A mean difference with its sign and its standard error, if it is known."""
    text = f"{difference.mean:+.1f}"
    error = "" if difference.error is None else f" ± {difference.error:.1f}"
    return f"{text}{error}".replace("-", "\N{MINUS SIGN}")


def _other_metrics(variants: Sequence[ComparedVariant]) -> str:
    names = [n for n in METRICS if n != "accuracy" and any(v.values(n) for v in variants)]
    if not names:
        return ""
    rows = []
    for variant in variants:
        found = [list(variant.values(name).values()) for name in names]
        digits = [metric_digits(METRICS[name]) for name in names]
        cells = [f"{fmean(f):.{d}f}" if f else DASH for f, d in zip(found, digits, strict=True)]
        rows.append((variant.label, cells))
    titles = [metric_label(name, METRICS[name]) for name in names]
    note = "Means over clients and seeds, transductive."
    return card("Other metrics", html_table(["", *titles], rows), note)


def _cost(variants: Sequence[ComparedVariant]) -> str:
    rows = []
    for variant in variants:
        row, cells = variant.runs[0].row, []
        for key, (_, unit, digits) in COST.items():
            cells.append(f"{row[key] / unit:,.{digits}f}" if is_number(row.get(key)) else DASH)
        seconds = list(variant.values("seconds").values())
        kept = list(variant.values("round").values())
        cells.append(f"{fmean(kept):,.0f}" if kept else DASH)
        cells.append(duration(fmean(seconds)) if seconds else DASH)
        rows.append((variant.label, cells))
    titles = ["", *(title for title, _, _ in COST.values()), "round kept", "a run took"]
    note = "Per client of middling size, and per round where it is of training."
    return card("Cost", html_table(titles, rows), note)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
