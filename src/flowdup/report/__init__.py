"""What a run looks like to a person: figure 1 of the paper, and a page for a run folder."""

from flowdup.report.embedding import embedding_figure
from flowdup.report.html import write_report

__all__ = ["embedding_figure", "write_report"]
