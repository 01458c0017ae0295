"""What a run looks like to a person: figure 1 of the paper, and a page.

It reads no run folder: what a page tells is passed in as `RunContents`.
"""

from flowdup.report.contents import RunContents, is_number
from flowdup.report.embedding import embedding_figure
from flowdup.report.html import page

__all__ = ["RunContents", "embedding_figure", "is_number", "page"]
