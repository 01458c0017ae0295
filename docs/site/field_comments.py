"""Shows the comment behind a field as its description, as `flowdup settings` does."""

import re
from typing import Any

import griffe

_COMMENT = re.compile(r"  # (?!type:|noqa)(?P<text>.*)$")


class FieldComments(griffe.Extension):
    """An attribute without a docstring is described by the comment at the end of its line."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring or not attr.lineno or not isinstance(attr.parent, griffe.Class):
            return
        lines = attr.lines_collection[attr.filepath][attr.lineno - 1 : attr.endlineno]
        found = [match["text"] for line in lines if (match := _COMMENT.search(line))]
        if found:
            attr.docstring = griffe.Docstring(" ".join(found), parent=attr)
