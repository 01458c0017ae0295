"""Settings as frozen dataclasses: read from tables, every key checked, written as TOML."""

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

from flowdup.errors import ConfigError, shorten

Table = Mapping[str, Any]

_ONE_OF_MANY = "[[{}]]"  # a table's head in TOML where there is a list of them
_LARGEST = 3.4028234e38  # number that float32 holds
_LONGEST_TEXT = 1000  # letters of a setting
_LONGEST_WORD = 200  # letters of a name that may have been meant for another
_MOST_HINTS = 3


def read_settings(kind: type[Any], table: Any, prefix: str = "") -> Any:
    """A dataclass from a table; `prefix` is where the table stands, "server." say.

    What the table leaves out keeps its default, inside a field's own table too.  A field whose type
    has `from_table` and `paths` reads itself.
    """
    return kind(**_read_values(kind, table, prefix, (kind, prefix)))


def _read_values(
    kind: type[Any], table: Any, prefix: str, top: tuple[type[Any], str]
) -> dict[str, Any]:
    """`top` is the whole that this table is a part of: another part may have what was meant."""
    table = as_table(table, prefix)
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        if key not in known:
            near = nearest(path, list(setting_paths(kind, prefix)), list(setting_paths(*top)))
            raise ConfigError(f"unknown setting '{shorten(path)}'{near}")
        hint = hints[key]
        if hasattr(hint, "from_table"):
            values[key] = hint.from_table(value, f"{path}.")
        elif is_dataclass(hint):
            inner = _read_values(hint, value, f"{path}.", top)  # type: ignore[arg-type]
            default: Any = known[key].default_factory
            values[key] = replace(default(), **inner)
        else:
            values[key] = _convert(hint, value, path)
    return values


def as_table(value: Any, prefix: str) -> Table:
    """The value if it is a table with texts for names; ConfigError otherwise."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"'{shorten(prefix.rstrip('.'))}' must be a table of settings, not {_quoted(value)}"
        )
    if any(not isinstance(key, str) for key in value):
        raise ConfigError(f"the settings of '{shorten(prefix)}' must have texts for names")
    return value


def setting_paths(kind: type[Any], prefix: str) -> Iterator[str]:
    """Every valid dotted key at and below a table."""
    for name, hint in get_type_hints(kind).items():
        if hasattr(hint, "paths"):
            yield from hint.paths(f"{prefix}{name}.")
        elif is_dataclass(hint):
            yield from setting_paths(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{name}"


def nearest(word: str, valid: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    """A hint at what was probably meant: the word where it is nested otherwise (`server.lr` is
    `server.optimizer.lr`), or else the most similar one, by all of it or by its last part.
    """
    if len(word) > _LONGEST_WORD:
        return ""
    near = _nested(word, valid) or _nested(word, elsewhere)
    near = near or difflib.get_close_matches(word, valid, 1)
    if not near:
        tails = difflib.get_close_matches(_tail(word), list(map(_tail, valid)), 1)
        near = [path for path in valid if _tail(path) in tails][:1]
    quoted = " or ".join(f"'{path}'" for path in near)
    return f" (did you mean {quoted}?)" if near else ""


def _nested(word: str, valid: Sequence[str]) -> list[str]:
    """The paths, and the tables that they are in, with the word's last part; none if many."""
    parts = (path.split(".") for path in valid)
    every = [".".join(names[:end]) for names in parts for end in range(1, len(names) + 1)]
    found = [path for path in dict.fromkeys(every) if _tail(path) == _tail(word)]
    return found if len(found) <= _MOST_HINTS else []


def _tail(path: str) -> str:
    return path.rpartition(".")[2]


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Refuse a value outside low .. high."""
    if not low <= value <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ConfigError(f"setting '{name}' must be {bounds}, not {_quoted(value)}")


def read_scalar(value: Any, path: str) -> Any:
    """A single value of any type that TOML knows but dates, checked as a setting's is."""
    if type(value) not in (str, int, float, bool):
        raise ConfigError(
            f"setting '{shorten(path)}' must have single values, not {_quoted(value)}"
        )
    return _convert(type(value), value, shorten(path))


def plain(value: Any) -> Any:
    """Dataclasses as tables, tuples as lists."""
    if hasattr(value, "table"):
        return value.table()
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def to_toml(settings: Any) -> str:
    """Every key with its value."""
    return "\n".join(_toml_lines(plain(settings), ())) + "\n"


def _convert(hint: Any, value: Any, path: str) -> Any:
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_convert(get_args(hint)[0], item, path) for item in value)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ConfigError(f"setting '{path}' must be a number of 64 bits, not {_quoted(value)}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)  # of 64 bits: finite
    if type(value) is not hint:
        wanted = "list" if get_origin(hint) is tuple else hint.__name__
        raise ConfigError(f"setting '{path}' must be a {wanted}, not {_quoted(value)}")
    if isinstance(value, str) and not _writable(value):
        raise ConfigError(
            f"setting '{path}' must be a text of UTF-8, without zeros and of at most "
            f"{_LONGEST_TEXT} letters, not '{shorten(ascii(value)[1:-1])}'"
        )
    if isinstance(value, float) and not abs(value) <= _LARGEST:
        raise ConfigError(f"setting '{path}' must be a number finite in float32, not {value}")
    return value


def _writable(text: str) -> bool:
    """Whether a text can stand in a file and name one."""
    whole = not any("\ud800" <= letter <= "\udfff" for letter in text)
    return whole and "\0" not in text and len(text) <= _LONGEST_TEXT


def _quoted(value: object) -> str:
    """A value as Python would write it, cut where it is long."""
    return f"'{shorten(value)}'" if isinstance(value, str) else shorten(value)


def _toml_lines(table: Table, path: tuple[str, ...], head: str = "[{}]") -> Iterator[str]:
    tables = {k: v for k, v in table.items() if isinstance(v, Mapping) or _is_list_of_tables(v)}
    scalars = {k: v for k, v in table.items() if k not in tables}
    if path and (scalars or head == _ONE_OF_MANY):
        yield "\n" + head.format(".".join(map(_toml_key, path)))
    for key, value in scalars.items():
        yield f"{_toml_key(key)} = {toml_value(value)}"
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, (*path, key))
        else:
            for item in value:
                yield from _toml_lines(item, (*path, key), _ONE_OF_MANY)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: Any) -> str:
    """A value of a setting as TOML writes it in one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # a JSON string is a TOML string but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    return repr(value)
