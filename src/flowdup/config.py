"""The settings of a run: one tree of frozen dataclasses, read from a preset or a TOML file."""

import logging
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from flowdup.client import ClientConfig
from flowdup.data import DataConfig
from flowdup.engines import EngineConfig
from flowdup.errors import ConfigError, shorten
from flowdup.methods import MethodConfig
from flowdup.server import ServerConfig
from flowdup.settings import Table, as_table, check_range, nearest, read_settings

_LOG = logging.getLogger(__name__)
_MOST_TOML = 2**18  # bytes
_MOST_DOTS = 1000  # in a line
_DEEPEST = 20  # parts of a setting's name


@dataclass(frozen=True)
class RunConfig:
    """Settings of `run`: when to evaluate and store, and which round counts."""

    evaluate_every: int = 50  # rounds between evaluations on validation clients
    checkpoint_every: int = 50  # rounds between checkpoints
    keep: str = "best"  # the round of a stage that counts: best on validation clients, or last
    patience: int = 0  # evaluations without a better one after which a stage ends; 0: never.
    # They count after server.warm_up; a stage that begins from a model is also evaluated before
    # its first round
    false_alarms: float = 0.05  # share of clients like those of training that are called foreign,
    # for which limits are stored when a run ends; 0: none are
    log: tuple[str, ...] = ()  # where metrics go beside metrics.jsonl: tensorboard

    def __post_init__(self) -> None:
        if self.keep not in ("best", "last"):
            raise ConfigError(f"run.keep is 'best' or 'last', not '{shorten(self.keep)}'")
        if unknown := {*self.log} - {"tensorboard"}:
            raise ConfigError(f"run.log can name 'tensorboard', not '{shorten(min(unknown))}'")
        check_range("run.false_alarms", self.false_alarms, 0, 0.5)
        check_range("run.patience", self.patience, 0)
        check_range("run.evaluate_every", self.evaluate_every, 1)
        check_range("run.checkpoint_every", self.checkpoint_every, 1)


@dataclass(frozen=True)
class Stage:
    """A part of a run with a method of its own."""

    method: MethodConfig = field(default_factory=lambda: MethodConfig.from_table({}))
    client: ClientConfig = field(default_factory=ClientConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True)
class Config:
    """What a run does; `before` holds stages that come first, each beginning where the one before
    it ended, and in a TOML file what differs in them from the last stage, which the rest describes.
    """

    seed: int = 0  # of all that is random: clients, cohorts, batches, theta_0, P
    model: str = "cnn"  # of the clients, f: a name from `register_model` or of flowdup's own
    data: DataConfig = field(default_factory=DataConfig)
    method: MethodConfig = field(default_factory=lambda: MethodConfig.from_table({}))
    client: ClientConfig = field(default_factory=ClientConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    run: RunConfig = field(default_factory=RunConfig)
    start: str = ""  # a run folder or a safetensors file whose weights the first stage begins from;
    # inputs are read with mean and std of the start, if it has them
    prior: str = ""  # a run folder of the same federation, whose psi training begins from
    before: tuple[Stage, ...] = ()  # stages that come first, [[before]] each: what differs in them

    @property
    def rounds(self) -> int:
        """Of all stages together."""
        return sum(stage.server.rounds for stage in self.stages)

    @property
    def stages(self) -> "list[Config]":
        """Each as a run of its own."""
        before = [
            replace(self, method=s.method, client=s.client, server=s.server, before=())
            for s in self.before
        ]
        return [*before, replace(self, before=())]


def read_config(table: Table) -> Config:
    """The settings that a table (parsed TOML) stands for; ConfigError names a key that is wrong."""
    last = {key: value for key, value in as_table(table, "").items() if key != "before"}
    config: Config = read_settings(Config, last)
    before = table.get("before", [])
    if isinstance(before, Mapping) and before:
        raise _no_stage(next(iter(before)), ())
    if not isinstance(before, list):
        raise ConfigError("'before' must be a list of tables, [[before]] each: the stages before")
    stages = (_read_stage(last, stage, number) for number, stage in enumerate(before, 1))
    return replace(config, before=tuple(stages))


def _read_stage(last: Table, change: Any, number: int) -> Stage:
    """The last stage with what differs in another."""
    own = {f.name for f in fields(Stage)}
    base = {key: value for key, value in last.items() if key in own}
    try:
        stage: Stage = read_settings(Stage, merge(base, as_table(change, "before")))
    except ConfigError as error:
        raise ConfigError(f"in [[before]] number {number}: {error}") from None
    return stage


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """A preset by name or a TOML file by path, with `key=value` overrides on top."""
    table = load_table(name)
    if "compare" in table:
        raise ConfigError(f"'{name}' compares several methods: run `flowdup compare {name}`")
    changed = override(table, *overrides)
    tell_of_kept_stages(table, changed)
    return read_config(changed)


def load_table(name: str, above: tuple[str, ...] = ()) -> Table:
    """A preset or a TOML file, on top of what it names as its `base`: one of these, or several."""
    table = dict(_read_table(name))
    base = table.pop("base", [])
    bases = [base] if isinstance(base, str) else base
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
        raise ConfigError(f"'base' in '{shorten(name)}' must be the name of a preset or file")
    if name in above or len(above) > _DEEPEST:
        raise ConfigError(f"'{shorten(name)}' is based on itself: remove its 'base'")
    beside = [str(Path(name).parent / b) if b.endswith(".toml") else b for b in bases]
    merged: dict[str, Any] = {}
    for part in (*(load_table(each, (*above, name)) for each in beside), table):
        below, merged = merged, merge(merged, part)
        tell_of_kept_stages(below, merged)
    return merged


def tell_of_kept_stages(old: Table, new: Table) -> None:
    """Warn where settings of several stages got another method, and the stages before stayed."""
    name, before = _method_name(new), new.get("before")
    if not before or not isinstance(before, list) or before != old.get("before"):
        return
    if name != _method_name(old):
        first = ", ".join(f"'{_method_name(as_table(s, 'before')) or name}'" for s in before)
        _LOG.warning(
            "method.name = '%s' is the last stage alone, and %s still comes before it: set "
            "before = [] to leave that out",
            shorten(name),
            shorten(first),
        )


def _read_table(name: str) -> Table:
    if name.endswith(".toml"):
        return read_toml(Path(name))
    names = preset_names()
    if name not in names:
        raise ConfigError(
            f"unknown preset '{shorten(name)}'{nearest(name, names)}: use one of {', '.join(names)}"
            ", or a TOML file"
        )
    return tomllib.loads(preset_text(name))


def read_toml(path: Path) -> Table:
    """A TOML file as a table; ConfigError if it cannot be read, is too long or is not TOML."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_TOML + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a TOML file") from None
    try:
        if len(content) > _MOST_TOML:
            raise ValueError(f"it is longer than {_MOST_TOML:,} bytes")
        return parse_toml(content.decode())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table that a text stands for; ValueError if it is not TOML or without end nested."""
    if any(line.count(".") > _MOST_DOTS for line in text.split("\n")):  # tomllib takes their square
        raise ValueError(f"a line has more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested without end") from None
    except (KeyError, TypeError, AttributeError) as error:  # tomllib's on some malformed keys
        raise ValueError(f"it cannot be parsed ({shorten(error)})") from None


def preset_text(name: str) -> str:
    """The TOML text of a preset."""
    return (files("flowdup") / "presets" / f"{name}.toml").read_text("utf-8")


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    entries = (files("flowdup") / "presets").iterdir()
    return sorted(e.name.removesuffix(".toml") for e in entries if e.name.endswith(".toml"))


def merge(base: Table, over: Table) -> dict[str, Any]:
    """`over` on top of `base`, table by table; another method's settings do not carry over, and
    `before.1.KEY` is one of the first of the stages in `base`.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            other_method = key == "method" and value.get("name", old.get("name")) != old.get("name")
            merged[key] = dict(value) if other_method else merge(old, value)
        elif key == "before" and isinstance(value, Mapping) and isinstance(old, list):
            merged[key] = _with_changes(old, value, _method_name(over) or _method_name(base))
        elif key == "before" and isinstance(value, list) and isinstance(old, Mapping) and old:
            raise ConfigError(
                f"'before.{shorten(next(iter(old)))}' changes a stage before it is there: name "
                "what has the stages first, and what changes them after it"
            )
        else:
            merged[key] = value
    return merged


def _with_changes(stages: list[Any], changes: Table, method: str | None) -> list[Any]:
    """Stages with changes on top, by the number that messages give a stage, too; one that names no
    method has the last stage's.
    """
    numbered = {str(number): stage for number, stage in enumerate(stages, 1)}
    for number, change in changes.items():
        if number not in numbered:
            raise _no_stage(number, numbered)
        old, new = (as_table(t, f"before.{number}") for t in (numbered[number], change))
        if method and _method_name(new):
            old = merge({"method": {"name": method}}, old)
        numbered[number] = merge(old, new)
    return list(numbered.values())


def _method_name(table: Table) -> str | None:
    method = table.get("method")
    return method.get("name") if isinstance(method, Mapping) else None


def _no_stage(number: str, known: Collection[str]) -> ConfigError:
    there = ", ".join(f"before.{n}" for n in known)
    use = f"use {there}" if there else "none comes before the last"
    return ConfigError(f"there is no stage 'before.{shorten(number)}': {use}")


def override(table: Table, *texts: str) -> dict[str, Any]:
    """A table with `key=value` texts on top: stages first, a method's name before its settings."""

    def turn(text: str) -> int:
        key = text.partition("=")[0].strip()
        return 0 if key == "before" else 1 if f".{key}".endswith(".method.name") else 2

    for text in sorted(texts, key=turn):
        table = merge(table, _read_change(text))
    return dict(table)


def _read_change(text: str) -> dict[str, Any]:
    """One `key=value` as a table; the value is TOML, or else a plain string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set needs key=value, not '{shorten(text)}'")
    try:
        parsed = parse_toml(f"x = {value}")["x"]
    except ValueError:
        parsed = value.strip()
    return nest(key.strip(), parsed)


def nest(key: str, value: Any) -> dict[str, Any]:
    """A table with one dotted key."""
    first, *rest = key.split(".")
    if len(rest) >= _DEEPEST:
        raise ConfigError(f"there is no setting '{shorten(key)}': its name has too many parts")
    return {first: nest(".".join(rest), value) if rest else value}
