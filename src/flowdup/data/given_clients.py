"""Clients that a trained federation is given: read, and brought into its form and its classes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flowdup.data.class_names import are_names_of_codes
from flowdup.data.client_groups import Clients, name_classes, name_numbers, used_labels
from flowdup.data.clients import ClientData
from flowdup.data.data_config import DataConfig
from flowdup.data.image_files import ImageReader, find_images, read_image_client, with_channels
from flowdup.data.input_spec import InputSpec
from flowdup.data.inspection import find_source
from flowdup.data.loading import read_clients
from flowdup.data.tensors import listed
from flowdup.data.user_data import read_client_file
from flowdup.errors import ConfigError, DataError, shorten

GROUPS = ("train", "validation", "test")


def read_given_clients(
    path: Path, config: DataConfig, spec: InputSpec, group: str = ""
) -> list[ClientData]:
    """All clients of a folder or table, or those of one of its groups; or one client's own file.

    They are read by the columns of `with_columns` and must fit `spec`, whose classes they get.
    """
    found = _read(path, with_columns(config, spec), spec)
    if group and group not in found:
        there = "no groups" if "all" in found else f"the groups {listed(found)}"
        raise ConfigError(
            f"{path} has {there}, and not '{group}': leave --group out, or store the clients in "
            f"{path / group}"
        )
    clients = found[group] if group else [c for members in found.values() for c in members]
    return fit_clients(clients, found.class_names or config.class_names, spec, str(path))


def with_columns(config: DataConfig, spec: InputSpec) -> DataConfig:
    """The settings, which name the inputs' columns as the federation knows them if they do not."""
    if config.input_columns != DataConfig.input_columns or not spec.columns:
        return config
    return replace(config, input_columns=spec.columns)


def fit_clients(
    clients: Sequence[ClientData], class_names: Sequence[str], spec: InputSpec, where: str
) -> list[ClientData]:
    """The clients, checked, with the numbers that `spec` gives to classes of these names.

    Labels without names are numbers of its classes already, or names of these that were codes.
    Gray images get equal channels.
    """
    if not class_names and are_names_of_codes(spec.class_names):
        clients, class_names = name_numbers(clients)
    if class_names:
        numbers = _class_numbers(clients, class_names, spec, where)
        clients = [c if c.y is None else replace(c, y=_renumbered(c.y, numbers)) for c in clients]
    return [spec.check(replace(c, x=with_channels(c.x, spec.shape))) for c in clients]


def _read(path: Path, config: DataConfig, spec: InputSpec) -> Clients:
    columns = (config.label_column or None, config.input_columns, config.shape or None)
    if path.is_file():
        one = read_client_file(path, config.client_column, *columns)
        if one is not None:
            return name_classes({"all": [one]}, path)
    if path.is_dir() and _is_one_client(path, spec):
        return name_classes({"all": [read_image_client(path, ImageReader())]}, path, numbers=False)
    return read_clients(replace(config, source=find_source(path), path=str(path)))


def _is_one_client(folder: Path, spec: InputSpec) -> bool:
    """Whether a folder has a client's images, sorted by classes of the federation."""
    inside = {path.name for path in folder.iterdir() if path.is_dir() and find_images(path)}
    return bool(inside) and inside <= {*spec.class_names}


def _class_numbers(
    clients: Sequence[ClientData], class_names: Sequence[str], spec: InputSpec, where: str
) -> torch.Tensor:
    """The number in `spec` of every class that has a point; -1 for the others."""
    known: Mapping[str, int] = {name: number for number, name in enumerate(spec.class_names)}
    used = {label for label in used_labels(clients) if label >= 0}
    numbers = torch.full((len(class_names),), -1)
    if used and max(used) >= len(class_names):
        raise DataError(
            f"{where} has the label {max(used)} and data.class_names {len(class_names)} names: "
            "give one for each class"
        )
    for old in sorted(used):
        name = class_names[old]
        number = known.get(name, -1) if known else _as_number(name, spec.classes)
        if number < 0:
            names = listed(known) if known else f"numbers from 0 to {spec.classes - 1}"
            raise DataError(
                f"{where} has points of class '{shorten(name)}', and the classes that were learned "
                f"are {names}: rename it to one of these, or take its labels away"
            )
        numbers[old] = number
    return numbers


def _as_number(name: str, classes: int) -> int:
    """A class's name that is its number; -1 if it is none."""
    number = int(name) if name.isascii() and name.isdecimal() and len(name) < 20 else -1
    return number if number < classes else -1


def _renumbered(y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return torch.where(y >= 0, numbers[y.clamp(min=0)], -1)
