"""JSON from files that anybody may have written: one meaning, bounded, of known types.

Standard JSON only, but for `read_lenient_json`: no NaN, no duplicate keys, no nesting without end.
Every fault is a ValueError whose text completes "the file is damaged: ...".
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from flowdup.errors import shorten

Object = Mapping[str, Any]


def read_json(content: bytes | str) -> Any:
    """Parsed JSON; ValueError for a name that stands twice, NaN, infinity or endless nesting."""
    try:
        return json.loads(content, object_pairs_hook=_object, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested without end") from None


def read_lenient_json(content: bytes | str) -> Any:
    """For files that are only told of: NaN and infinity are None, of a repeated key the last."""
    try:
        return json.loads(content, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("it is nested without end") from None


def read_object(content: bytes | str) -> dict[str, Any]:
    """The same, and it must be an object."""
    found = read_json(content)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def seal(table: Object) -> bytes:
    """A JSON object as text, with a SHA-256 of itself in it."""
    text = json.dumps(table, sort_keys=True)
    return json.dumps(
        {**table, "sha256": hashlib.sha256(text.encode()).hexdigest()}, indent=2
    ).encode()


def unseal(content: bytes) -> dict[str, Any]:
    """The object that was sealed; ValueError if a byte is not as it was."""
    table = read_object(content)
    table.pop("sha256", None)
    if seal(table) != content:
        raise ValueError("it is truncated or was changed")
    return table


def get_text(table: Object, key: str) -> str:
    """The text under a key; ValueError if there is none."""
    return str(_get(table, key, str, "a text"))


def get_object(table: Object, key: str) -> dict[str, Any]:
    """The object under a key; ValueError if there is none."""
    found: dict[str, Any] = _get(table, key, dict, "an object")
    return found


def get_count(table: Object, key: str) -> int:
    """A whole number from 0 to 2^63 - 1."""
    return as_count(_get(table, key, int, "a whole number"), key)


def get_integer(table: Object, key: str) -> int:
    """A whole number of 64 bits, with a sign."""
    found = int(_get(table, key, int, "a whole number"))
    as_count(abs(found), key)
    return found


def get_counts(table: Object, key: str) -> tuple[int, ...]:
    """The list of whole numbers from 0 on under a key; ValueError if there is none."""
    return tuple(as_count(item, key) for item in _get(table, key, list, "a list"))


def get_numbers(table: Object, key: str) -> tuple[float, ...]:
    """Finite ones; a whole number stays one."""
    found = _get(table, key, list, "a list")
    for item in found:
        if type(item) not in (int, float) or abs(item) > 1e300 or not math.isfinite(item):
            raise ValueError(f"'{key}' holds {shorten(item)} instead of a finite number")
    return tuple(found)


def get_texts(table: Object, key: str) -> tuple[str, ...]:
    """The list of texts under a key; ValueError if there is none."""
    found = _get(table, key, list, "a list")
    if wrong := [item for item in found if type(item) is not str]:
        raise ValueError(f"'{key}' holds {shorten(wrong[0])} instead of a text")
    return tuple(found)


def get_number(table: Object, key: str) -> float:
    """A finite number."""
    found = get_numbers({key: [table.get(key)]}, key)
    return found[0]


def as_count(value: Any, key: str) -> int:
    """The value if it is a whole number from 0 on; ValueError names the key otherwise."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(
            f"'{shorten(key)}' has {shorten(value)} instead of a whole number from 0 on"
        )
    return value


def _get(table: Object, key: str, kind: type[Any], what: str) -> Any:
    if key not in table:
        raise ValueError(f"it has no '{key}'")
    if type(table[key]) is not kind:  # a bool is an int
        raise ValueError(f"'{key}' is {shorten(table[key])} instead of {what}")
    return table[key]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("it has a key twice")
    return table


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it has the number {name}, which is not JSON")
