"""Lists the fields of a class in the reference, each with the comment behind it in the source."""

import re
from collections.abc import Iterator
from typing import Any

import griffe

_BEHIND = re.compile(r"  # (?!type:|noqa)(?P<text>.*)$")
_ALONE = re.compile(r"^\s*# (?P<text>.*)$")


class FieldComments(griffe.Extension):
    """Adds a table of a class's fields to its docstring; `flowdup settings` reads the same text."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        fields = [a for a in cls.attributes.values() if _is_field(a)]
        if cls.docstring and fields:
            rows = [f"| {_declaration(a)} | {_comment(a)} |" for a in fields]
            table = "\n".join(["| field | |", "| --- | --- |", *rows])
            cls.docstring.value += f"\n\n{table}\n"


def _is_field(attribute: griffe.Attribute) -> bool:
    annotated = attribute.annotation is not None and "property" not in attribute.labels
    return annotated and not attribute.name.startswith("_") and not attribute.docstring


def _declaration(attribute: griffe.Attribute) -> str:
    value = str(attribute.value) if attribute.value is not None else ""
    if made := re.fullmatch(r"field\(default_factory=(lambda: )?(.*)\)", value):
        value = made[2] if made[1] else f"{made[2]}()"
    return f"`{attribute.name}: {attribute.annotation}{f' = {value}' if value else ''}`"


def _comment(attribute: griffe.Attribute) -> str:
    return " ".join(_comments(attribute)).replace("|", "\\|")


def _comments(attribute: griffe.Attribute) -> Iterator[str]:
    """The comment behind a field, and the lines right below that go on with it."""
    lines = attribute.lines_collection[attribute.filepath]
    last = attribute.endlineno or attribute.lineno or 0
    behind = [_BEHIND.search(line) for line in lines[(attribute.lineno or 1) - 1 : last]]
    found = [match["text"] for match in behind if match]
    yield from found
    while found and last < len(lines) and (match := _ALONE.match(lines[last])):
        yield match["text"]
        last += 1
