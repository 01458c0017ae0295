"""What pages are made of: the frame, cards, tables.  A page opens anywhere: no script, no font, no
network.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from flowdup.report.chart import CHART_STYLE
from flowdup.version import __version__

# Nothing may run or load, whatever a file of the run says.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --card: #fff; --ink: #1c1d1f; --soft: #62656b;
  --rule: #e6e6e3; --accent: #0072b2;
  --series-0: #0072b2; --series-1: #d55e00; --series-2: #009e73; --series-3: #c04f92;
  --series-4: #b8860b; --series-5: #35a0d8; --series-6: #6b6f76; }
@media (prefers-color-scheme: dark) { :root { --page: #141517; --card: #1c1e21; --ink: #ececea;
  --soft: #a0a4ab; --rule: #33363b; --accent: #5ab4ea;
  --series-0: #5ab4ea; --series-1: #ff8a3d; --series-2: #3ccf9f; --series-3: #ec9ccb;
  --series-4: #f0c04e; --series-5: #a5dcff; --series-6: #b9bcc2; } }
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
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 0; padding: 0;
  list-style: none; font-size: 13px; overflow-wrap: anywhere; }
.legend svg { display: inline-block; width: 24px; height: 8px; margin-right: 6px; }
header { margin-bottom: 28px; }
footer { color: var(--soft); font-size: 13px; margin-top: 24px; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 0 5px 12px; border-top: 1px solid var(--rule); }
th { font-weight: 400; color: var(--soft); font-size: 13px; }
thead th { border: 0; }
td { white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; overflow-wrap: anywhere; min-width: 96px; }
.scroll th:first-child { position: sticky; left: 0; background: var(--card); }
tbody th { color: var(--ink); font-size: inherit; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font: 13px/1.5 ui-monospace, monospace; margin: 12px 0 0; }
@media (max-width: 600px) { body { padding: 24px 12px 40px; } .card { padding: 14px; }
  svg .tick { font-size: 16px; } svg .name { font-size: 16px; } svg .value { font-size: 15px; } }
"""


def document(title: str, body: Sequence[str]) -> str:
    """The whole page of parts that are HTML; the title is escaped, and all of it can be encoded."""
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · flowdup</title>"
        f"<style>{STYLE}{CHART_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )
    return text.encode(errors="replace").decode()  # halves of letters from JSON


def html_table(titles: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Titles and the names of rows are escaped here; cells are HTML."""
    heads = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    lines = []
    for name, cells in rows:
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{row}</tr>')
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table>{body}</table></div>'


def card_grid(cards: Sequence[str]) -> str:
    """Cards side by side; nothing if there are none."""
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def card(title: str, content: str, note: str = "") -> str:
    """A titled box of a page, with a note below."""
    caption = f"<figcaption>{note}</figcaption>" if note else ""
    return f'<figure class="card"><h2>{title}</h2>{content}{caption}</figure>'


def footer(made: str) -> str:
    """With what the results were made, if it is known, and the page."""
    told = f"Evaluated with {made}. " if made else ""
    return f"<footer>{escape(told)}Page by flowdup {__version__}.</footer>"


def provenance_text(result: Mapping[str, Any]) -> str:
    """Versions, commit and device of a result, as far as it has them."""
    versions = result.get("versions")
    told = [f"{n} {v}" for n, v in versions.items()] if isinstance(versions, Mapping) else []
    told += [f"commit {result['commit']}"] if result.get("commit") else []
    told += [str(result["device"])] if result.get("device") else []
    return ", ".join(told)


def percent(value: float) -> str:
    """A number of percent, with one decimal."""
    return f"{value:.1f}&nbsp;%"


def duration(seconds: float) -> str:
    """Seconds for people: 4.2 s, 3 min 5 s, 2 h 10 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
