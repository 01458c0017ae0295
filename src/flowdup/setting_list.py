"""The list of all settings: key, default and meaning, read from the dataclasses themselves.

A setting's meaning is the comment behind its field in the source, and the comment lines right
below; there is no second text that could fall behind.
"""

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, get_type_hints

from flowdup.config import Config
from flowdup.errors import ConfigError, shorten
from flowdup.methods import METHODS, CommonSettings, MethodConfig
from flowdup.settings import nearest, plain, toml_value


@dataclass(frozen=True)
class Setting:
    """One setting: its key, default and meaning."""

    key: str  # as in `--set KEY=VALUE`
    default: str  # as in TOML
    meaning: str  # empty where the source has no comment, or cannot be read
    methods: tuple[str, ...] = ()  # that have it so; empty: every run has it


def list_settings(prefix: str = "") -> list[Setting]:
    """All settings, or those whose key is the prefix or begins with it and a dot."""
    every = list(_settings(Config, plain(Config()), ""))
    start = prefix.rstrip(".")
    found = [s for s in every if not start or s.key == start or s.key.startswith(f"{start}.")]
    if not found:
        tables = {s.key.rpartition(".")[0] for s in every} - {""}
        near = nearest(start, [s.key for s in every] + sorted(tables))
        raise ConfigError(f"no setting begins with '{shorten(prefix)}'{near}")
    return found


def field_comments(kind: type[Any]) -> dict[str, str]:
    """The comment behind every field of a dataclass, of those that it inherits, too."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        found |= _own_comments(base) if is_dataclass(base) else {}
    return found


def _settings(kind: type[Any], defaults: dict[str, Any], prefix: str) -> Iterator[Setting]:
    comments, hints = field_comments(kind), get_type_hints(kind)
    for name, hint in hints.items():
        key, default = f"{prefix}{name}", defaults[name]
        if hint is MethodConfig:
            yield from _method_settings(default["name"], f"{key}.")
        elif is_dataclass(hint) and not hasattr(hint, "from_table"):
            yield from _settings(hint, default, f"{key}.")  # type: ignore[arg-type]
        else:
            yield Setting(key, toml_value(default), comments.get(name, ""))


def _method_settings(default: str, prefix: str) -> Iterator[Setting]:
    """Those of every method; methods with the same default and meaning share a line."""
    yield Setting(f"{prefix}name", toml_value(default), field_comments(MethodConfig)["name"])
    yield from _settings(CommonSettings, plain(CommonSettings()), prefix)
    found: dict[Setting, list[str]] = {}
    for name, entry in METHODS.items():
        for setting in _settings(entry.settings, plain(entry.settings()), prefix):
            found.setdefault(setting, []).append(name)
    keys = list(dict.fromkeys(setting.key for setting in found))
    for setting in sorted(found, key=lambda setting: keys.index(setting.key)):
        yield replace(setting, methods=tuple(found[setting]))


def _own_comments(kind: type[Any]) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # made at a prompt, or installed without its source
        return {}
    comments = dict(_comment_lines(source))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.end_lineno or node.lineno
            lines = [t for i in range(node.lineno, last + 1) if (t := comments.get(i, ("", 0))[0])]
            lines += _following(comments, last + 1) if lines else []
            found[node.target.id] = " ".join(lines)
    return {name: text for name, text in found.items() if text}


def _comment_lines(source: str) -> Iterable[tuple[int, tuple[str, bool]]]:
    """By line: the comment, and whether it stands alone."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line.lstrip().startswith("#")
            yield token.start[0], (token.string.lstrip("#").strip(), alone)


def _following(comments: dict[int, tuple[str, bool]], line: int) -> Iterator[str]:
    """The comments that stand alone from this line on, without a gap."""
    while line in comments and comments[line][1]:
        yield comments[line][0]
        line += 1
