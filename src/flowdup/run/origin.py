"""What a run was started with, and whether it is still that: the first difference is named.

The sealed header of every checkpoint holds all settings and the SHA-256 of clients.json, in which
every client has a digest of its data.  Nothing that a person edits is believed before it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowdup.checkpoint import RunOrigin, read_origin
from flowdup.config import Config, override, read_config
from flowdup.data import MEMORY, Population
from flowdup.errors import CheckpointError, ConfigError, DataError
from flowdup.run.folder import RunFolder, read_stored
from flowdup.settings import plain

# of data, checkpoints have digests; they have names, too, which may be given later
_NAMES = ("data.path", "data.class_names")
_MAY_DIFFER = ("engine.", *_NAMES, "run.checkpoint_every", "run.false_alarms", "run.log")


def origin_of(config: Config, listing: bytes) -> RunOrigin:
    """What a run began with: its settings, and a digest of who takes part."""
    return RunOrigin(plain(config), hashlib.sha256(listing).hexdigest())


def listing_of(population: Population) -> bytes:
    """Who takes part, as a run folder records it; of clients that are checked."""
    return json.dumps(population.listing()).encode()


def with_absolute_paths(config: Config) -> Config:
    """The same with absolute paths, so that they mean the same from any folder."""
    path, start, prior = config.data.path, config.start, config.prior
    if path and Path(path).exists():  # a source of one's own may mean something else by its path
        path = str(Path(path).absolute())
    start, prior = (str(Path(p).absolute()) if p else "" for p in (start, prior))
    return replace(config, data=replace(config.data, path=path), start=start, prior=prior)


def with_given_clients(config: Config) -> Config:
    """The same, saying that its clients were given in Python: no other setting of `data` counts."""
    return replace(config, data=replace(config.data, source=MEMORY, path=""))


def stored_config(folder: RunFolder, overrides: Sequence[str] = ()) -> Config:
    """The settings in config.toml, or in the checkpoint if there is no such file, with `key=value`
    overrides on top; ConfigError if config.toml has other settings than the run.
    """
    if folder.started and not folder.config.is_file():
        config = read_stored(_origin(folder).config)
    else:
        config = folder.read_config()
        if folder.started:
            check_settings(folder, config, folder.config.name)
    return read_config(override(plain(config), *overrides))


def check_settings(folder: RunFolder, new: Config, where: str = "the settings given") -> None:
    """Refuse to go on as another run.

    A run may go on elsewhere, recorded more often, or with more rounds if no rate hangs on them.
    """
    old = read_stored(_origin(folder).config)
    free = _free_settings(old)
    if new.data.source == MEMORY:  # the clients' digests tell whether they are the same
        free = (*free, "data.")
    a, b = dict(_flat(plain(old))), dict(_flat(plain(new)))
    for key in dict.fromkeys((*b, *a)):
        if not key.startswith(free) and a.get(key) != b.get(key):
            raise ConfigError(
                f"{key} is {_value_text(b, key)} in {where} and {_value_text(a, key)} in the "
                "checkpoint: go on with the old value or choose another folder"
            )


def _free_settings(config: Config) -> tuple[str, ...]:
    """Beginnings of the names of settings that may differ from those that a run was started with.

    A correction is fitted at every evaluation, and a teacher may know it; of several stages,
    evaluations decide which round the next one begins from.  A longer run goes on from what the
    last evaluation fitted.
    """
    corrected = any(stage.method.common.correction != "none" for stage in config.stages)
    free = [*_MAY_DIFFER]
    if not config.before:
        free += ["run.keep", "run.patience"]
        if not corrected:
            free.append("run.evaluate_every")
    if not config.server.lr_decay_fraction:
        free.append("server.rounds")
    return tuple(free)


def check_clients(folder: RunFolder, listing: bytes) -> None:
    """Refuse clients other than those that the run was started with."""
    if hashlib.sha256(listing).hexdigest() == _origin(folder).clients_sha256:
        return
    difference = f"and {folder.clients} is not as it was, so nobody can say which differ"
    if stored := stored_listing(folder):
        difference = next(_differences(stored, json.loads(listing)))
    raise DataError(
        f"the clients are not those with which the run was started, {difference}: restore their "
        "data or choose another folder"
    )


def stored_listing(folder: RunFolder) -> dict[str, Any]:
    """Who takes part, by group; empty if the list is not the one that the run was started with."""
    stored = folder.clients.read_bytes() if folder.clients.is_file() else b""
    if hashlib.sha256(stored).hexdigest() != _origin(folder).clients_sha256:
        return {}
    listing: dict[str, Any] = json.loads(stored)
    return listing


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for group in {**old, **new}:
        before, now = old.get(group, []), new.get(group, [])
        if isinstance(before, Mapping) or isinstance(now, Mapping):  # lazy clients
            if before != now:
                yield f"the {group} clients are made otherwise"
            continue
        for number, (a, b) in enumerate(zip(before, now, strict=False)):
            who = f"client '{b['name']}'" if b["name"] else f"client {number} of {group}"
            if a["name"] != b["name"]:
                yield f"{who} was '{a['name']}'"
            if a["sha256"] != b["sha256"]:
                yield f"{who}: its data differ"
            if a != b:
                yield f"{who}: its traits, images or labels differ"
        if len(before) != len(now):
            yield f"there are {len(now)} {group} clients and were {len(before)}"


def _origin(folder: RunFolder) -> RunOrigin:
    origin = read_origin(folder.checkpoint)
    if origin is None:
        raise CheckpointError(
            f"{folder.checkpoint} was saved outside of a run: choose another folder"
        )
    return origin


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if not prefix and key == "before":
            for number, stage in enumerate(value, 1):
                yield from _flat(stage, f"{key}.{number}.")
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value_text(table: Mapping[str, Any], key: str) -> str:
    return json.dumps(table[key]) if key in table else "not given"
