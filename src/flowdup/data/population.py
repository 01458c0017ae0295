"""From the settings of `data` to the clients of a federation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import inf, isfinite
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flowdup.data.class_names import CLASSES_ONLY, RANGES
from flowdup.data.client_groups import Clients
from flowdup.data.clients import ClientData, InputSpec, Population, check_names
from flowdup.data.femnist import Femnist
from flowdup.data.images import ImageSet
from flowdup.data.labels import LabeledTraits, hide_labels
from flowdup.data.lazy import lazy_clients
from flowdup.data.partition import Recipe, make_clients
from flowdup.data.sources import SOURCES, data_folder
from flowdup.data.statistics import with_statistics
from flowdup.data.tensors import channels_last_sentence, listed, looks_channels_last
from flowdup.data.user_data import read_folder, read_table
from flowdup.errors import ConfigError, DataError
from flowdup.random import Stream
from flowdup.registry import Registry
from flowdup.settings import check_range

MEMORY = "memory"  # the source of a run whose clients were given in Python
_LEAST = {
    "points": 1,
    "train_clients": 0,
    "validation_clients": 0,
    "test_clients": 0,
    "certify_clients": 0,
    "classes_per_client": 0,
    "dirichlet": 0,
    "classes": 0,
}
# settings for some sources alone, and what stands for "not set" in TOML
_FOR_RECIPES = {
    "classes_per_client": "0",
    "dirichlet": "0.0",
    "rotations": "[]",
    "stratified": "[]",
    "overlap": "false",
    "lazy": "false",
}
_FOR_OWN_CLIENTS = {"path": '""', "classes": "0", "shape": "[]", "mean": "[]", "std": "[]"}
_LAZY_SHARE = 0.2  # of the images, that validation (or certify) clients have beside lazy ones


@dataclass(frozen=True)
class DataConfig:
    """Settings of `data`: where clients come from, how many there are, who keeps labels."""

    source: str = "digits"  # an image set; femnist, whose clients are its writers; folder or table
    train_clients: int = 0  # how many; 0: as many as the data give
    validation_clients: int = 50  # how many, for choosing rounds and settings
    test_clients: int = 100  # how many, for `flowdup evaluate`
    certify_clients: int = 0  # how many, for `flowdup certify` alone: nothing else touches them
    labeled_fraction: float = 1.0  # p: the share of training clients that keep their labels
    labeled_traits: LabeledTraits = field(default_factory=LabeledTraits)  # traits that
    # clients must have to keep labels

    # simulated clients
    points: int = 100  # images per client
    classes_per_client: int = 0  # how many of the classes a client has; 0: all
    dirichlet: float = 0.0  # concentration of a client's label shares (of all classes, or of its
    # own); 0: equally many points of each of its classes, or as all images have them
    rotations: tuple[int, ...] = ()  # degrees; every client has one of them
    stratified: tuple[str, ...] = ()  # groups (validation, test) that have every set of classes and
    # every rotation equally often; others draw them
    overlap: bool = False  # whether two clients of a group may share a point
    lazy: bool = False  # whether training clients are made when asked for and never stored

    # your own clients
    path: str = ""  # of the folder or the table, where source is one of these
    classes: int = 0  # how many there are; 0: the largest label + 1
    class_names: tuple[str, ...] = ()  # of class 0, 1, ..., where labels are numbers
    shape: tuple[int, ...] = ()  # table or CSV: of one input, if its columns are flat
    client_column: str = "client"  # table or CSV: names the client of each row
    label_column: str = "label"  # table or CSV: the class of each row; empty: there are no labels
    input_columns: tuple[str, ...] = ("x",)  # of a table; a CSV without x: all other numbers
    normalize: bool = True  # where mean and std are empty: by those of the training clients' inputs
    # per channel, from sums, not data; lazy clients' inputs stay as they are
    mean: tuple[float, ...] = ()  # per channel, taken off before std divides
    std: tuple[float, ...] = ()  # per channel, divides what mean has left

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_range(f"data.{name}", getattr(self, name), least)
        check_range("data.train_clients", self.train_clients, 0, 2**32)  # one is drawn by a word
        check_range("data.labeled_fraction", self.labeled_fraction, 0, 1)
        if not {*self.stratified} <= {"validation", "test"}:
            raise ConfigError(
                f"data.stratified must name groups, validation or test, not {list(self.stratified)}"
            )
        if any(size < 1 for size in self.shape):
            raise ConfigError(f"data.shape must have sizes of at least 1, not {list(self.shape)}")
        if not all(0 < s < inf for s in self.std) or not all(map(isfinite, self.mean)):
            raise ConfigError(
                "data.std must have numbers above 0 and data.mean finite ones, not "
                f"{list(self.std)} and {list(self.mean)}"
            )
        if len({*filter(None, self.class_names)}) < len(self.class_names):
            raise ConfigError(
                f"data.class_names has a name twice or an empty one, {list(self.class_names)}: "
                "give every class a name of its own"
            )
        if len(self.mean) != len(self.std):
            raise ConfigError(
                "data.mean and data.std must have equally many numbers, not "
                f"{len(self.mean)} and {len(self.std)}"
            )


Loaded = Population | Sequence[ClientData] | Mapping[str, Sequence[ClientData]]
Loader = Callable[[DataConfig, Stream], Loaded]


def load_population(config: DataConfig, stream: Stream) -> Population:
    """All clients of a federation, checked."""
    found = LOADERS.find(config.source)(config, stream)
    if isinstance(found, Population):
        population = found.checked()
    else:
        population = _population(found, config, stream).checked()
        if config.normalize and not config.mean:
            spec = with_statistics(population.spec, population.train)
            population = replace(population, spec=spec)
    names = check_names(population.spec, config.class_names, config.source)
    population = replace(population, spec=replace(population.spec, class_names=names))
    fraction, traits = config.labeled_fraction, config.labeled_traits
    train = hide_labels(population.train, fraction, traits, stream.child("labels"))
    return replace(population, train=train)


def register_source(name: str, load: Loader) -> None:
    """Make a source of clients available under a name that `data.source` can have.

    `load(config, stream)` gives a Population, or clients that are split by the settings of `data`:
    a sequence of them, or several by the names train, validation, test and certify.
    """
    LOADERS.register(name, load)


def _refuse(config: DataConfig, settings: Mapping[str, str], why: str) -> None:
    given = [f"data.{name} = {unset}" for name, unset in settings.items() if getattr(config, name)]
    if given:
        raise ConfigError(f"data.source = '{config.source}' {why}: set {' and '.join(given)}")


def _refuse_recipe(config: DataConfig) -> None:
    _refuse(config, _FOR_RECIPES, "has clients of its own, which are not made by a recipe")


def _refuse_description(config: DataConfig) -> None:
    why = "is a public set, whose inputs and classes are known and which lies in FLOWDUP_DATA"
    _refuse(config, _FOR_OWN_CLIENTS, why)


def _writers(source: Femnist, config: DataConfig, stream: Stream) -> Population:
    _refuse_recipe(config)
    _refuse_description(config)
    groups = _split(source.load(data_folder()), config, stream)
    spec = InputSpec(source.shape, "uint8", source.classes, source.mean, source.std)
    return Population(spec, **groups)


def _simulated(source: ImageSet, config: DataConfig, stream: Stream) -> Population:
    """Test clients from the source's test images, the others from disjoint parts of the rest."""
    _refuse_description(config)
    if config.lazy and not (config.overlap and config.train_clients):
        raise ConfigError(
            "data.lazy needs clients that may share points, and to know how many there are: set "
            "data.overlap = true and data.train_clients"
        )
    images = source.load(data_folder())
    total = len(images.y_train)
    held = {"validation": config.validation_clients, "certify": config.certify_clients}
    fit = total // config.points - sum(held.values())
    train_clients = config.train_clients or max(fit, 0)
    if train_clients < 1:
        raise ConfigError(
            f"{total} images leave no training client of {config.points} points: lower data.points "
            "or data.validation_clients, or set data.train_clients and data.overlap"
        )
    shares = [count / (train_clients + sum(held.values())) for count in held.values()]
    if config.lazy:  # the pools, and so the clients, are the same for any number of clients
        shares = [_LAZY_SHARE if count else 0.0 for count in held.values()]
    sizes = [count * config.points for count in held.values()]
    sizes = [round(share * total) for share in shares] if config.overlap else sizes
    cuts = [min(cut, total) for cut in accumulate(sizes)]  # too many are refused below, by name
    order = stream.child("pool").permutation(total)
    if config.classes_per_client or config.dirichlet:
        order = _interleave_classes(order, images.y_train.numpy())
    validation, certify, train = torch.from_numpy(order).tensor_split(cuts)
    pools = {
        "validation": (images.x_train, images.y_train, validation),
        "certify": (images.x_train, images.y_train, certify),
        "train": (images.x_train, images.y_train, train),
        "test": (images.x_test, images.y_test, torch.arange(len(images.y_test))),
    }
    counts = held | {"train": train_clients, "test": config.test_clients}
    recipe = Recipe(
        config.points,
        config.classes_per_client,
        config.rotations,
        config.overlap,
        config.dirichlet,
    )
    groups: dict[str, Sequence[ClientData]] = {
        name: make_clients(
            recipe, *pools[name], counts[name], stream.child(name), name in config.stratified
        )
        for name in pools
        if not (config.lazy and name == "train")
    }
    if config.lazy:
        labeled = round(config.labeled_fraction * train_clients)
        groups["train"] = lazy_clients(
            recipe, *pools["train"], train_clients, labeled, stream.child("train")
        )
    spec = InputSpec(source.shape, "uint8", source.classes, source.mean, source.std)
    return Population(spec, **groups)


def _interleave_classes(order: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.int64]:
    """An order whose every beginning has all classes in proportion."""
    place = np.empty(len(order))
    for label in np.unique(y):
        mine = np.flatnonzero(y[order] == label)
        place[mine] = (np.arange(mine.size) + 0.5) / mine.size
    return order[np.argsort(place, kind="stable")]


def _read_files(config: DataConfig, stream: Stream) -> Loaded:
    _refuse_recipe(config)
    return read_clients(config)


def read_clients(config: DataConfig) -> Clients:
    """The clients of a folder or a table, by group, before anything is split or checked."""
    if not config.path:
        raise ConfigError(f"data.source = '{config.source}' needs data.path")
    path = Path(config.path)
    label, shape = config.label_column or None, config.shape or None
    read = read_folder if config.source == "folder" else read_table
    return read(path, config.client_column, label, config.input_columns, shape)


def _population(
    found: Sequence[ClientData] | Mapping[str, Sequence[ClientData]],
    config: DataConfig,
    stream: Stream,
) -> Population:
    """Clients of a user's, whose inputs tell what all must look like."""
    groups = found if isinstance(found, Mapping) else {"all": found}
    if "all" in groups:
        groups = _split(groups["all"], config, stream)
    known = {"train", "validation", "test", "certify"}
    if not {"train"} <= groups.keys() <= known or not groups["train"]:
        raise DataError(
            f"data.source = '{config.source}' gave the groups {', '.join(groups) or '(none)'}: "
            "give train, with at least one client, and perhaps validation, test and certify"
        )
    if config.certify_clients and "certify" not in groups:
        raise ConfigError(
            "data.certify_clients needs clients that are not in groups yet: put some into a group "
            "'certify', and set data.certify_clients = 0"
        )
    train = groups["train"]
    first = train[0].x
    if first.ndim < 2:
        raise DataError(
            f"data.source = '{config.source}' gave inputs of shape {tuple(first.shape)}: give an "
            "array with one row per point"
        )
    dtype = "uint8" if first.dtype == torch.uint8 else "float32"
    names = found.class_names if isinstance(found, Clients) else ()
    classes = _check_count(names, config) or config.classes or len(config.class_names)
    classes = classes or _count_classes(train)
    if len(config.mean) not in (0, 1, first.shape[1]):
        if looks_channels_last(first.shape[1:], square=False):
            raise DataError(channels_last_sentence(first.shape[1:]))
        raise ConfigError("data.mean and data.std need one number each, or one per channel")
    spec = InputSpec(tuple(first.shape[1:]), dtype, classes, config.mean, config.std, names)
    held = (groups.get(name, []) for name in ("validation", "test", "certify"))
    return Population(spec, train, *held)


def _split(
    clients: Sequence[ClientData], config: DataConfig, stream: Stream
) -> dict[str, list[ClientData]]:
    """The clients dealt out by the stream; training gets data.train_clients, or all that remain."""
    order = [clients[i] for i in stream.child("split").permutation(len(clients))]
    tested = config.validation_clients + config.test_clients
    held = tested + config.certify_clients
    if held + max(config.train_clients, 1) > len(order):
        aside = f", {config.certify_clients} to certify" if config.certify_clients else ""
        raise ConfigError(
            f"{len(order)} clients cannot give {config.validation_clients} to validation, "
            f"{config.test_clients} to test{aside} and {config.train_clients or 'some'} to "
            "training: lower data.validation_clients, data.test_clients or data.train_clients"
        )
    return {
        "validation": order[: config.validation_clients],
        "test": order[config.validation_clients : tested],
        "certify": order[tested:held],
        "train": order[held:][: config.train_clients or None],
    }


def _check_count(names: Sequence[str], config: DataConfig) -> int:
    """How many classes have names; 0 if none has."""
    if names and config.classes not in (0, len(names)):
        raise ConfigError(
            f"data.classes is {config.classes} and {config.path} names {len(names)} classes "
            f"({listed(names)}): set data.classes = 0"
        )
    if len(names) == 1:
        raise DataError(f"all labels of {config.path} are '{names[0]}': give two classes or more")
    return len(names)


def _count_classes(clients: Sequence[ClientData]) -> int:
    if floats := [c.name for c in clients if c.y is not None and c.y.is_floating_point()]:
        raise DataError(f"client '{floats[0]}' has floats for labels: {CLASSES_ONLY}, so {RANGES}")
    largest = max((int(c.y.max()) for c in clients if c.y is not None and len(c)), default=-1)
    if largest < 1:
        raise DataError(
            "the number of classes cannot be read from the training labels: set data.classes"
        )
    return largest + 1


def _public(source: ImageSet | Femnist) -> Loader:
    if isinstance(source, Femnist):
        return partial(_writers, source)
    return partial(_simulated, source)


def _refuse_memory(config: DataConfig, stream: Stream) -> Population:
    raise DataError(
        "the clients of this run were given in Python and are not in its folder: call "
        "flowdup.train_run or flowdup.evaluate_run with the same population"
    )


LOADERS: Registry[Loader] = Registry(
    "data source",
    {name: _public(source) for name, source in SOURCES.items()}
    | {"folder": _read_files, "table": _read_files, MEMORY: _refuse_memory},
)
