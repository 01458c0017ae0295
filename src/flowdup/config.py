"""The settings of a run: one tree of frozen dataclasses, read from TOML, every key checked."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from flowdup.client import ClientConfig
from flowdup.data import DataConfig
from flowdup.engines import EngineConfig
from flowdup.errors import ConfigError
from flowdup.methods import METHODS, Method, Parts
from flowdup.server import ServerConfig

Table = Mapping[str, Any]


@dataclass(frozen=True)
class MethodConfig:
    """A method's name and its own settings."""

    name: str
    settings: Any

    def build(self, parts: Parts) -> Method:
        method: Method = METHODS[self.name][1](self.settings, parts)
        return method


@dataclass(frozen=True)
class RunConfig:
    evaluate_every: int = 50  # rounds between evaluations on validation clients
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        if self.evaluate_every < 1 or self.checkpoint_every < 1:
            raise ConfigError("run.evaluate_every and run.checkpoint_every must be at least 1")


@dataclass(frozen=True)
class Config:
    seed: int = 0
    model: str = "cnn"  # f
    data: DataConfig = field(default_factory=DataConfig)
    method: MethodConfig = field(default_factory=lambda: read_method({}))
    client: ClientConfig = field(default_factory=ClientConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    run: RunConfig = field(default_factory=RunConfig)


def read_config(table: Table) -> Config:
    config: Config = _read(Config, table, "")
    return config


def read_method(table: Table) -> MethodConfig:
    """`name` chooses the method, the other keys are its own settings."""
    rest = dict(table)
    name = rest.pop("name", "flowdup")
    if name not in METHODS:
        near = _nearest(str(name), list(METHODS))
        raise ConfigError(f"unknown method '{name}'{near}: use one of {', '.join(METHODS)}")
    return MethodConfig(name, _read(METHODS[name][0], rest, "method."))


def method_table(config: MethodConfig) -> dict[str, Any]:
    table: dict[str, Any] = _plain(config.settings)
    return {"name": config.name} | table


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """A preset by name or a TOML file by path, with `key=value` overrides on top."""
    table = load_table(name)
    if "compare" in table:
        raise ConfigError(f"'{name}' compares several methods: run `flowdup compare {name}`")
    for text in overrides:
        table = override(table, text)
    return read_config(table)


def load_table(name: str) -> Table:
    presets = files("flowdup") / "presets"
    if name.endswith(".toml"):
        source = Path(name)
        if not source.is_file():
            raise ConfigError(f"there is no file {name}: give a preset's name or a TOML file")
        text = source.read_text()
    else:
        names = preset_names()
        if name not in names:
            near = _nearest(name, names)
            raise ConfigError(
                f"unknown preset '{name}'{near}: use one of {', '.join(names)}, or a TOML file"
            )
        text = (presets / f"{name}.toml").read_text()
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from None


def preset_names() -> list[str]:
    entries = (files("flowdup") / "presets").iterdir()
    return sorted(e.name.removesuffix(".toml") for e in entries if e.name.endswith(".toml"))


def merge(base: Table, over: Table) -> dict[str, Any]:
    """`over` on top of `base`, table by table; another method's settings do not carry over."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            other_method = key == "method" and value.get("name", old.get("name")) != old.get("name")
            merged[key] = dict(value) if other_method else merge(old, value)
        else:
            merged[key] = value
    return merged


def override(table: Table, text: str) -> dict[str, Any]:
    """A table with one `key=value` on top; the value is TOML, or else a plain string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set needs key=value, not '{text}'")
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return merge(table, nest(key.strip(), parsed))


def nest(key: str, value: Any) -> dict[str, Any]:
    """A table with one dotted key."""
    first, _, rest = key.partition(".")
    return {first: nest(rest, value) if rest else value}


def to_toml(config: Config) -> str:
    """The resolved settings, every key with its value."""
    table = _plain(config) | {"method": method_table(config.method)}
    return "\n".join(_toml_lines(table, ())) + "\n"


def _read(kind: type[Any], table: Any, prefix: str) -> Any:
    if not isinstance(table, Mapping):
        raise ConfigError(f"'{prefix.rstrip('.')}' must be a table of settings, not {table!r}")
    hints = get_type_hints(kind)
    names = [f.name for f in fields(kind)]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in names:
            near = _nearest(f"{prefix}{key}", list(_paths(kind, prefix)) or names)
            raise ConfigError(f"unknown setting '{prefix}{key}'{near}")
        hint = hints[key]
        if hint is MethodConfig:
            values[key] = read_method(value)
        elif is_dataclass(hint):
            values[key] = _read(hint, value, f"{prefix}{key}.")  # type: ignore[arg-type]
        else:
            values[key] = _convert(hint, value, f"{prefix}{key}")
    return kind(**values)


def _convert(hint: Any, value: Any, path: str) -> Any:
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_convert(get_args(hint)[0], item, path) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        wanted = "list" if get_origin(hint) is tuple else hint.__name__
        raise ConfigError(f"setting '{path}' must be a {wanted}, not {value!r}")
    return value


def _paths(kind: type[Any], prefix: str) -> Iterator[str]:
    """Every valid dotted key at and below a table."""
    for name, hint in get_type_hints(kind).items():
        if hint is MethodConfig:
            for settings, _ in METHODS.values():
                yield from _paths(settings, f"{prefix}{name}.")
        elif is_dataclass(hint):
            yield from _paths(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{name}"


def _nearest(word: str, valid: Sequence[str]) -> str:
    def tail(path: str) -> str:
        return path.rpartition(".")[2]

    near = difflib.get_close_matches(word, valid, 1, 0.6)
    near = near or [
        p for p in valid if tail(p) in difflib.get_close_matches(tail(word), map(tail, valid), 1)
    ]
    return f" (did you mean '{near[0]}'?)" if near else ""


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _toml_lines(table: Table, path: tuple[str, ...]) -> Iterator[str]:
    scalars = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    if path and scalars:
        yield f"\n[{'.'.join(path)}]"
    for key, value in scalars.items():
        yield f"{key} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, (*path, key))


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return repr(value)
