"""What a user's data are like: clients, labels, inputs, and what is odd about them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from flowdup.data.client_groups import name_codes
from flowdup.data.clients import ClientData
from flowdup.data.data_config import DataConfig
from flowdup.data.loading import read_clients
from flowdup.data.statistics import OFFSET_REMEDY, ChannelSums, combine, offset_sentence
from flowdup.data.tensors import (
    channels_last_sentence,
    listed,
    looks_channels_last,
    looks_gray,
)
from flowdup.errors import ConfigError, DataError
from flowdup.settings import Table, read_settings

READING = ("client_column", "label_column", "input_columns", "shape")
_TABLES = ("*.parquet", "*.arrow", "state.json")
_RARE = 5  # times less often than the mean class
_MOST_CLASSES = 100_000
_FEW = 10  # clients, or points of a client


@dataclass(frozen=True)
class Inspection:
    """Facts of all clients; `problems` keep them from training, `remarks` do not."""

    source: str  # folder or table
    path: str
    groups: dict[str, int]  # clients by group; one group "all" is still to be split
    shape: tuple[int, ...]
    dtype: str
    points: dict[str, float]  # of a client: least, median, most
    labeled: int  # clients with at least one label
    labeled_groups: dict[str, int]  # of them, by group
    class_names: tuple[str, ...]
    class_points: tuple[int, ...]  # points of class 0, 1, ...
    classes_per_client: float  # median over labeled clients
    reading: Table  # settings of `data` that it was read with, beside source and path
    columns: tuple[str, ...] = ()  # of a table, whose numbers are the inputs
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def clients(self) -> int:
        """How many clients there are, in all groups."""
        return sum(self.groups.values())


def inspect_clients(path: Path, reading: Table | None = None) -> Inspection:
    """Look at a folder or table of clients, as `data.source` reads them by default or with settings
    of `data` that say how (`READING`).
    """
    reading = reading or {}
    own = {"source": find_source(path), "path": str(path.absolute())}
    config: DataConfig = read_settings(DataConfig, {**reading, **own}, "data.")
    stored = read_clients(config)
    groups = name_codes(stored)
    if reading and config.source == "folder" and not groups.columns:
        raise ConfigError(
            f"the clients of {path} are no CSV files, and 'data.{next(iter(reading))}' says how to "
            "read columns: leave it out"
        )
    clients = [client for members in groups.values() for client in members]
    if not clients:
        raise DataError(f"{path} has no clients: store a file or folder for each")
    shapes = Counter(tuple(c.x.shape[1:]) for c in clients)
    shape = shapes.most_common(1)[0][0]
    bytes_at = sum(c.x.dtype == torch.uint8 for c in clients)
    sizes = [len(c) for c in clients]
    labels = [torch.unique(c.y[c.y >= 0]) for c in clients if c.y is not None and c.labeled]
    counts = torch.zeros(max(_count_classes(clients), len(groups.class_names)), dtype=torch.int64)
    for c in clients:
        if c.y is not None:
            counts += torch.bincount(c.y[c.y >= 0], minlength=len(counts))
    found = Inspection(
        config.source,
        config.path,
        {group: len(members) for group, members in groups.items()},
        shape,
        "uint8" if bytes_at > len(clients) / 2 else "float32",
        {"least": min(sizes), "median": median(sizes), "most": max(sizes)},
        len(labels),
        {group: sum(c.labeled for c in members) for group, members in groups.items()},
        groups.class_names,
        tuple(counts.tolist()),
        median(map(len, labels)) if labels else 0,
        reading,
        groups.columns,
    )
    found.problems.extend(_find_problems(clients, groups, found))
    if not found.problems:
        found.remarks.extend(_find_remarks(clients, labels, found))
        if groups is not stored:
            names = listed(groups.class_names)
            found.remarks.append(
                f"labels are numbers with gaps, and are read as names of classes: {names}; for "
                "classes from 0 up to the largest, set data.classes"
            )
        if groups.no_label:
            found.remarks.append(
                f"labels that were read as none: {listed(groups.no_label)}; if one of them is a "
                "class, give it another name"
            )
    return found


def find_source(path: Path) -> str:
    """Which `data.source` reads it: a file and a folder of Parquet or Arrow files are tables."""
    folders = [path / "train", path] if path.is_dir() else []
    tables = any(any(folder.glob(pattern)) for folder in folders for pattern in _TABLES)
    return "table" if tables or path.is_file() else "folder"


def _count_classes(clients: Sequence[ClientData]) -> int:
    labeled = {c.name: int(c.y.max()) for c in clients if c.y is not None and len(c)}
    name = max(labeled, key=labeled.__getitem__, default="")
    largest = labeled.get(name, -1)
    if largest >= _MOST_CLASSES:
        raise DataError(f"client '{name}' has the label {largest}: number the classes from 0 on")
    return largest + 1


def _find_problems(
    clients: Sequence[ClientData], groups: Mapping[str, Sequence[ClientData]], found: Inspection
) -> list[str]:
    problems = []

    def tell(members: list[ClientData], what: str) -> None:
        if members:
            who = "clients" if len(members) > 1 else "client"
            problems.append(f"{who} {listed(c.name for c in members)}: {what}")

    tell([c for c in clients if not len(c)], "no points; give some, or leave it out")
    other = [c for c in clients if tuple(c.x.shape[1:]) != found.shape]
    tell(other, f"inputs of another shape than {list(found.shape)}, which most have; convert them")
    mixed = [c for c in clients if (c.x.dtype == torch.uint8) != (found.dtype == "uint8")]
    tell(
        mixed, f"inputs are not {found.dtype} as those of client '{clients[0].name}'; convert them"
    )
    broken = [c for c in clients if not bool(torch.isfinite(c.x).all())]
    points = sum(int((~torch.isfinite(c.x)).flatten(1).any(1).sum()) for c in broken)
    tell(broken, f"NaN or infinite numbers in {points} points; clean or drop these points")
    tell(
        [c for c in clients if c.y is not None and len(c) and int(c.y.min()) < -1],
        "labels below -1; store whole numbers from 0 on, -1 for none",
    )
    kinds = sum(n > 0 for n in found.class_points)
    if not found.labeled:
        problems.append("no client has a label; give some clients labels")
    elif kinds == 1:
        problems.append("all labels are of one class; give two classes or more")
    elif not any(c.labeled for c in groups.get("train", clients)):
        problems.append("no training client has a label; move some clients with labels to train")
    if looks_channels_last(found.shape):
        problems.append(channels_last_sentence(found.shape))
    return problems


def _find_remarks(
    clients: Sequence[ClientData], labels: Sequence[torch.Tensor], found: Inspection
) -> list[str]:
    remarks = []
    same: dict[str, list[str]] = {}
    for c in clients:
        same.setdefault(c.digest(), []).append(c.name)
    if twins := [names for names in same.values() if len(names) > 1]:
        again = sum(len(names) - 1 for names in twins)
        remarks.append(
            f"{again} clients have exactly the data of another ({listed(twins[0])}): the same one "
            "may train and test, so keep one of each"
        )
    sums = combine(ChannelSums.of(c.x) for c in clients)
    varying = sums.varying()
    if constant := [str(i) for i, varies in enumerate(varying) if not varies]:
        remarks.append(f"input channels that never vary: {listed(constant)} (of {len(varying)})")
    if told := offset_sentence(*sums.mean_and_std(), found.columns):
        remarks.append(f"{told}: {OFFSET_REMEDY}")
    if looks_gray(found.shape, found.dtype):
        height, width = found.shape
        remarks.append(
            f"inputs of shape {list(found.shape)} are read as {height} channels of {width} "
            f"numbers: if these are gray images, store them as [n, 1, {height}, {width}], "
            "x[:, None] in NumPy"
        )
    if unlabeled := found.clients - found.labeled:
        remarks.append(f"{unlabeled} of {found.clients} clients have no labels")
    if alone := sum(len(own) == 1 for own in labels):
        remarks.append(_one_class(alone, found.labeled))
    points = sum(found.class_points)
    if missing := [str(i) for i, n in enumerate(found.class_points) if n == 0]:
        remarks.append(f"classes without a point: {listed(missing)}")
    rare = points / (_RARE * len(found.class_points))
    if few := [str(i) for i, n in enumerate(found.class_points) if 0 < n < rare]:
        remarks.append(
            f"classes with less than a fifth of the mean number of points: {listed(few)}"
        )
    largest = max(found.class_points) / points
    if largest > max(0.5, 2 / len(found.class_points)):
        remarks.append(f"{100 * largest:.0f}% of all labels are of one class")
    if found.clients < _FEW:
        remarks.append(f"only {found.clients} clients: accuracies of so few vary much")
    if tiny := sum(len(c) < _FEW for c in clients):
        remarks.append(f"{tiny} clients have less than {_FEW} points")
    return remarks


def _one_class(alone: int, labeled: int) -> str:
    """What follows where clients' labels are of one class."""
    told = f"{alone} of {labeled} labeled clients have one class only"
    if 2 * alone < labeled:
        return told
    return (
        f"{told}: accuracy on validation clients like these says little of clients with several "
        "classes, and a correction for class shares (method.correction), calibrated on them, may "
        "mislead; label points of more classes, or compare with method.correction = 'none'"
    )
