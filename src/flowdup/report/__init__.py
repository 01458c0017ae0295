"""What runs look like to a person: figure 1 of the paper, a page of a run, one of a comparison.

It reads no run folder: what a page tells is passed in.
"""

from flowdup.report.comparison import ComparedRun, ComparedVariant, comparison_page, spread_text
from flowdup.report.contents import RunContents, is_number
from flowdup.report.embedding import embedding_figure
from flowdup.report.html import page

__all__ = [
    "ComparedRun",
    "ComparedVariant",
    "RunContents",
    "comparison_page",
    "embedding_figure",
    "is_number",
    "page",
    "spread_text",
]
