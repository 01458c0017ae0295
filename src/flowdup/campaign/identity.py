"""A run's identity: the SHA-256 of the settings that decide its outcome.

Settings equal to today's defaults do not count, so a setting that is added later, with a default
that changes nothing, leaves the identity of older runs as it was; and an older run whose settings
are no longer the defaults is still found under what it was run with.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from flowdup.config import Config
from flowdup.methods import METHODS, MethodConfig
from flowdup.settings import Table, plain

_BESIDE_TRAINING = ("checkpoint_every", "false_alarms", "log")


def deciding_settings(config: Config) -> dict[str, Any]:
    """All settings but where a run is computed (`engine`), and what `run` does beside training."""
    return _deciding(plain(config))


def _deciding(settings: Table) -> dict[str, Any]:
    table = {key: value for key, value in settings.items() if key != "engine"}
    table["run"] = {k: v for k, v in table.get("run", {}).items() if k not in _BESIDE_TRAINING}
    return table


def distinct_settings(settings: Table) -> dict[str, Any]:
    """Those that are not today's defaults; the method's name always."""
    return _differing(_deciding(settings), _defaults())


def identity(settings: Table) -> str:
    """Of a run with these settings (`deciding_settings`), as 64 hexadecimal digits."""
    text = json.dumps(distinct_settings(settings), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _defaults() -> dict[str, Any]:
    return deciding_settings(Config())


def _differing(table: Table, default: Table) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key == "method":
            found[key] = _method(value)
        elif isinstance(value, Mapping) and isinstance(default.get(key), Mapping):
            if inner := _differing(value, default[key]):
                found[key] = inner
        elif _is_list_of_tables(value):  # stages, each with the same settings as the whole
            found[key] = [_differing(item, default) for item in value]
        elif key not in default or value != default[key]:
            found[key] = value
    return found


def _method(table: Table) -> dict[str, Any]:
    name = table.get("name")
    known = MethodConfig.from_table({"name": name}).table() if name in METHODS else {}
    return {"name": name} | _differing({k: v for k, v in table.items() if k != "name"}, known)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)
