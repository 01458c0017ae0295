"""Small charts as SVG text; their colours are the page's custom properties."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, median

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 58, 16, 40  # margins of the plot; the end label stands on the right
MOST_DOTS = 50
INFINITE, PERCENT = (-math.inf, math.inf), (0.0, 100.0)

# The page defines --ink, --soft, --rule, --card and --accent, for light and for dark.
CHART_STYLE = """
.grid { stroke: var(--rule); }
.line, .trend { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round; }
.faint { stroke-width: 1; opacity: .3; }
.dot, .end, .bar { fill: var(--accent); }
.dot { stroke: var(--card); stroke-width: 1; }
.mark { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 4 3; }
.tick { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.value { fill: var(--ink); font-size: 13px; font-weight: 600; }
.name { fill: var(--ink); font-size: 13px; }
.series { fill: none; stroke-width: 2; stroke-linejoin: round; }
.seed { stroke-width: 1; opacity: .35; }
.one { fill: var(--accent); opacity: .45; }
.reach { stroke: var(--accent); stroke-width: 2; }
"""

COLORS = 7  # the page's --series-0, --series-1, ...; further series are dashed
DASHES = ("", "6 3", "2 3")
ROW = 44  # of a chart of intervals


@dataclass(frozen=True)
class Axis:
    """Maps values between low and high to pixels between start and end."""

    low: float
    high: float
    start: float
    end: float
    step: float  # between ticks

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """The multiples of step between low and high."""
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        return [i * self.step for i in range(first, last + 1)]

    def text(self, value: float) -> str:
        """The value with as many digits as the ticks need."""
        if self.step < 1e-4 or self.step >= 1e7:
            return f"{value:.3g}"
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def nice_step(span: float, count: int, least: float = 0.0) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that covers span in at most count steps."""
    rough = max(span / count, least, 1e-12)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def rounded_axis(
    values: Sequence[float], start: float, end: float, bounds: tuple[float, float] = INFINITE
) -> Axis:
    """An axis that begins and ends at a tick around the values, inside bounds."""
    low, high = min(values), max(values)
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # a flat line in the middle
        room = 0.05 * abs(high) or 1.0
        low, high = max(low - room, bounds[0]), min(high + room, bounds[1])
    step = nice_step(high - low, 5)
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    return Axis(low, high, start, end, step)


def line_chart(
    points: Sequence[tuple[int, float]],
    span: tuple[int, int],
    name: str,
    percent: bool = False,
    trend: bool = False,
) -> str:
    """A curve of (round, value) over the rounds in span, with its last value at its end.

    The curve of class "line" has one vertex per point; with trend it is faint, under its running
    mean, and the value at the end is the mean's.
    """
    rounds, values = [r for r, _ in points], [v for _, v in points]
    low, high = min(span[0], span[1] - 1), span[1]
    x = Axis(low, high, LEFT, WIDTH - RIGHT, nice_step(high - low, 6, least=1))
    y = rounded_axis(values, HEIGHT - BOTTOM, TOP, PERCENT if percent else INFINITE)
    labels = [f"{v:.1f} %" if percent else f"{v:.3g}" for v in values]
    body = [_grid(x, y, "round"), _curve(x, y, rounds, values, "line faint" if trend else "line")]
    end, end_label = values[-1], labels[-1]
    if trend:
        mean = running_mean(values)
        body.append(_curve(x, y, rounds, mean, "trend"))
        end, end_label = mean[-1], f"{mean[-1]:.3g}"
    if len(points) <= MOST_DOTS:
        body += [
            f'<circle class="dot" cx="{x(r):.1f}" cy="{y(v):.1f}" r="3">'
            f"<title>round {r}: {text}</title></circle>"
            for (r, v), text in zip(points, labels, strict=True)
        ]
    body.append(f'<circle class="end" cx="{x(rounds[-1]):.1f}" cy="{y(end):.1f}" r="4"/>')
    body.append(_text(x(rounds[-1]) + 9, y(end) + 4, end_label, "value", "start"))
    first, last = f"{labels[0]} at round {rounds[0]}", f"{labels[-1]} at round {rounds[-1]}"
    return _svg(f"{name}: {first}, {last}", body)


@dataclass(frozen=True)
class Series:
    """Curves of (round, value) of one thing: of each seed, and their mean."""

    name: str
    seeds: Sequence[Sequence[tuple[int, float]]]

    @property
    def mean(self) -> list[tuple[int, float]]:
        """Over the rounds that all seeds have."""
        tables = [dict(curve) for curve in self.seeds]
        common = set(tables[0]).intersection(*tables[1:])
        return [(r, fmean(table[r] for table in tables)) for r in sorted(common)]


def stroke(number: int) -> str:
    """The style of the series with this number, as attributes of an SVG element."""
    dash = DASHES[number // COLORS % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'style="stroke: var(--series-{number % COLORS})"{dashed}'


def series_chart(series: Sequence[Series], name: str) -> str:
    """Curves in percent over rounds, one colour each: the mean, and faintly the seeds if several.

    Each needs a point; their names are for a legend beside the chart.
    """
    points = [point for one in series for curve in one.seeds for point in curve]
    low, high = min(r for r, _ in points), max(r for r, _ in points)
    low = min(low, high - 1)
    x = Axis(low, high, LEFT, WIDTH - 16, nice_step(high - low, 6, least=1))
    y = rounded_axis([v for _, v in points], HEIGHT - BOTTOM, TOP, PERCENT)
    body = [_grid(x, y, "round")]
    for number, one in enumerate(series):
        for curve in one.seeds if len(one.seeds) > 1 else ():
            body.append(_colored(x, y, curve, number, "series seed"))
    for number, one in enumerate(series):
        body.append(_colored(x, y, one.mean, number, "series", one.name))
    return _svg(f"{name}: {', '.join(one.name for one in series)}", body)


def _colored(
    x: Axis, y: Axis, curve: Sequence[tuple[int, float]], number: int, kind: str, title: str = ""
) -> str:
    points = " ".join(f"{x(r):.1f},{y(v):.1f}" for r, v in curve)
    if len(curve) == 1:  # a line of one point is drawn as a dash
        points = f"{x(curve[0][0]) - 6:.1f},{y(curve[0][1]):.1f} {points}"
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<polyline class="{kind}" {stroke(number)} points="{points}">{inner}</polyline>'


@dataclass(frozen=True)
class Interval:
    """A value with what it lies within, and the single values that it is the mean of."""

    name: str
    value: float
    reach: float | None  # to either side
    text: str
    parts: Sequence[float] = ()


def interval_chart(rows: Sequence[Interval], name: str, caption: str, zero: bool = False) -> str:
    """A line for each row, its name above it: a dot, what it lies within, and its parts."""
    ends = [row.value + sign * (row.reach or 0.0) for row in rows for sign in (-1, 1)]
    ends += [part for row in rows for part in row.parts] + ([0.0] if zero else [])
    height = TOP + ROW * len(rows) + BOTTOM
    x = rounded_axis(ends, 12, WIDTH - 12)
    lines = [
        f'<line class="grid" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        + _text(x(t), height - BOTTOM + 17, x.text(t), "tick", "middle")
        for t in x.ticks
    ]
    if zero:
        at = f'x1="{x(0):.1f}" x2="{x(0):.1f}"'
        lines.append(f'<line class="mark" {at} y1="{TOP}" y2="{height - BOTTOM}"/>')
    lines.append(_text(WIDTH / 2, height - 5, caption, "tick", "middle"))
    for number, row in enumerate(rows):
        y = TOP + ROW * number + 28
        lines.append(_text(12, y - 12, row.name, "name", "start"))
        lines.append(_text(WIDTH - 12, y - 12, row.text, "value", "end"))
        for part in row.parts:
            lines.append(f'<circle class="one" cx="{x(part):.1f}" cy="{y}" r="3.5"/>')
        if row.reach is not None:
            a, b = x(row.value - row.reach), x(row.value + row.reach)
            lines.append(f'<line class="reach" x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}"/>')
        lines.append(f'<circle class="end" cx="{x(row.value):.1f}" cy="{y}" r="5"/>')
    told = "; ".join(f"{row.name} {row.text}" for row in rows)
    return _svg(f"{name}: {told}", lines, height)


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours: 2 % of all on either side, 100 at most."""
    reach = min(100, len(values) // 50)
    return [fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def histogram(values: Sequence[float], name: str) -> str:
    """How many clients have which accuracy in percent, with the median marked."""
    bins = max(4, min(16, 2 * math.isqrt(len(values))))
    width = nice_step(max(values) - min(values), bins, least=1)
    first = min(math.floor(min(values) / width), round(100 / width) - 1)
    counts = [0] * (min(math.floor(max(values) / width), round(100 / width) - 1) - first + 1)
    for value in values:
        counts[min(math.floor(value / width) - first, len(counts) - 1)] += 1  # 100 % joins the last
    low, high = first * width, (first + len(counts)) * width
    x = Axis(low, high, LEFT, WIDTH - 16, width * math.ceil(len(counts) / 7))
    tall = nice_step(max(counts), 5, least=1)
    y = Axis(0, tall * math.ceil(max(counts) / tall), HEIGHT - BOTTOM, TOP + 14, tall)
    body = [_grid(x, y, "accuracy (%)")]
    for i, count in enumerate(counts):
        left, right = low + i * width, low + (i + 1) * width
        body.append(
            f'<rect class="bar" x="{x(left) + 1:.1f}" y="{y(count):.1f}" rx="2" '
            f'width="{x(right) - x(left) - 2:.1f}" height="{y(0) - y(count):.1f}">'
            f"<title>{left:g} to {right:g} %: {count}</title></rect>"
        )
    middle = median(values)
    at = x(middle)
    body.append(
        f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP + 2}" y2="{HEIGHT - BOTTOM}"/>'
    )
    side, anchor = (-5, "end") if at > WIDTH / 2 else (5, "start")
    body.append(_text(at + side, TOP + 4, f"median {middle:.1f} %", "value", anchor))
    return _svg(f"{name}: {len(values)} clients, median {middle:.1f} %", body)


def _grid(x: Axis, y: Axis, caption: str) -> str:
    lines = [
        f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        + _text(LEFT - 8, y(t) + 4, y.text(t), "tick", "end")
        for t in y.ticks
    ]
    lines += [_text(x(t), HEIGHT - BOTTOM + 17, x.text(t), "tick", "middle") for t in x.ticks]
    lines.append(_text((x.start + x.end) / 2, HEIGHT - 5, caption, "tick", "middle"))
    return "".join(lines)


def _curve(x: Axis, y: Axis, rounds: Sequence[int], values: Sequence[float], kind: str) -> str:
    points = " ".join(f"{x(r):.1f},{y(v):.1f}" for r, v in zip(rounds, values, strict=True))
    return f'<polyline class="{kind}" points="{points}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _svg(label: str, body: Sequence[str], height: float = HEIGHT) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
    return f"{head}{''.join(body)}</svg>"
