"""Groups of a user's clients, and labels that are named over all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flowdup.data.class_names import are_codes, read_labels, words_for_none
from flowdup.data.clients import ClientData
from flowdup.errors import DataError


class Clients(dict[str, list[ClientData]]):
    """Clients by group (train, validation and test, or just "all"), their classes' names, those of
    the columns that their inputs are, and words of the files that were read as no label.
    """

    def __init__(
        self,
        groups: Mapping[str, list[ClientData]],
        class_names: tuple[str, ...] = (),
        columns: tuple[str, ...] = (),
        no_label: Sequence[str] = (),
    ) -> None:
        super().__init__(groups)
        self.class_names, self.columns, self.no_label = class_names, columns, no_label


class Unnamed(NamedTuple):
    """A client whose labels may be texts, one per point ("": none), not yet numbers."""

    client: ClientData
    texts: Sequence[str] | None = None


def find_groups(path: Path) -> dict[str, Path]:
    """The folders of groups that there are; without `train`, the path itself is "all"."""
    if not path.exists():
        raise DataError(f"there is no {path}: give the path of the clients' data")
    if not (path / "train").is_dir():
        return {"all": path}
    groups = ("train", "validation", "test", "certify")
    return {group: path / group for group in groups if (path / group).is_dir()}


def name_classes(
    groups: Mapping[str, Sequence[Unnamed]],
    path: Path,
    class_names: tuple[str, ...] = (),
    numbers: bool = True,
    columns: tuple[str, ...] = (),
) -> Clients:
    """The clients with numbers for labels, each known to stand in one group only.

    `class_names` are those of labels that are numbers already; with `numbers`, texts that all are
    whole numbers are the labels and no names.
    """
    every = [found for members in groups.values() for found in members]
    clients = [found.client for found in every]
    no_label: list[str] = []
    if any(found.texts is not None for found in every):
        if mixed := [c.name for c in clients if c.y is not None]:
            raise DataError(
                f"client '{mixed[0]}' of {path} has numbers for labels and others have texts: "
                "store all labels in one way"
            )
        texts = [found.texts for found in every]
        labels, class_names = read_labels(texts, str(path), numbers)
        no_label = words_for_none(texts) if numbers else []
        clients = [replace(c, y=y) for c, y in zip(clients, labels, strict=True)]
    rest = iter(clients)
    named = {group: [next(rest) for _ in members] for group, members in groups.items()}
    _check_apart(named, path)
    return Clients(named, class_names, columns, no_label)


def name_codes(found: Clients) -> Clients:
    """The same, with codes for names where labels are numbers without names and are codes."""
    every = [client for members in found.values() for client in members]
    if found.class_names or not are_codes(used_labels(every)):
        return found
    clients, names = name_numbers(every)
    rest = iter(clients)
    groups = {group: [next(rest) for _ in members] for group, members in found.items()}
    return Clients(groups, names, found.columns, found.no_label)


def name_numbers(clients: Sequence[ClientData]) -> tuple[list[ClientData], tuple[str, ...]]:
    """The clients with labels counted from 0, and the numbers that these were as names."""
    used = used_labels(clients)
    values = torch.tensor(used, dtype=torch.int64)

    def counted(y: Tensor) -> Tensor:
        return torch.where(y >= 0, torch.searchsorted(values, y), y)

    named = [c if c.y is None else replace(c, y=counted(c.y)) for c in clients]
    return named, tuple(map(str, used))


def used_labels(clients: Sequence[ClientData]) -> list[int]:
    """Numbers that are labels, sorted; -1 for none is not among them."""
    found = {int(y) for c in clients if c.y is not None for y in torch.unique(c.y)}
    return sorted(found - {-1})


def _check_apart(clients: Mapping[str, Sequence[ClientData]], path: Path) -> None:
    group_of: dict[str, str] = {}
    for group, members in clients.items():
        for client in members:
            if (other := group_of.setdefault(client.name, group)) != group:
                raise DataError(
                    f"client '{client.name}' of {path} is in {other} and in {group}: keep it in "
                    "one of them, or rename one if they are two clients"
                )
