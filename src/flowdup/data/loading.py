"""From the settings of `data` to the clients of a federation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flowdup.data.class_names import CLASSES_ONLY, RANGES
from flowdup.data.client_groups import Clients, name_codes
from flowdup.data.clients import ClientData
from flowdup.data.data_config import MEMORY, DataConfig, refuse_description, refuse_recipe
from flowdup.data.femnist import Femnist
from flowdup.data.images import ImageSet
from flowdup.data.input_spec import InputSpec, check_names
from flowdup.data.labels import hide_labels
from flowdup.data.lazy import lazy_clients
from flowdup.data.partition import Recipe, make_clients
from flowdup.data.population import Population
from flowdup.data.sources import SOURCES, data_folder
from flowdup.data.split import split_clients
from flowdup.data.statistics import with_statistics
from flowdup.data.tensors import channels_last_sentence, listed, looks_channels_last
from flowdup.data.user_data import read_folder, read_table
from flowdup.errors import ConfigError, DataError
from flowdup.random import Stream
from flowdup.registry import Registry

_LAZY_SHARE = 0.2  # of the images, that validation (or certify) clients have beside lazy ones

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


def _writers(source: Femnist, config: DataConfig, stream: Stream) -> Population:
    refuse_recipe(config)
    refuse_description(config)
    groups = split_clients(source.load(data_folder()), config, stream)
    spec = InputSpec(source.shape, "uint8", source.classes, source.mean, source.std)
    return Population(spec, **groups)


def _simulated(source: ImageSet, config: DataConfig, stream: Stream) -> Population:
    """Test clients from the source's test images, the others from disjoint parts of the rest."""
    refuse_description(config)
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
    refuse_recipe(config)
    found = read_clients(config)
    return found if config.classes or config.class_names else name_codes(found)


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
        groups = split_clients(groups["all"], config, stream)
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
    names, columns = (found.class_names, found.columns) if isinstance(found, Clients) else ((), ())
    classes = _check_count(names, config) or config.classes or len(config.class_names)
    classes = classes or _count_classes(train)
    if len(config.mean) not in (0, 1, first.shape[1]):
        if looks_channels_last(first.shape[1:], square=False):
            raise DataError(channels_last_sentence(first.shape[1:]))
        raise ConfigError("data.mean and data.std need one number each, or one per channel")
    shape = tuple(first.shape[1:])
    spec = InputSpec(shape, dtype, classes, config.mean, config.std, names, columns)
    held = (groups.get(name, []) for name in ("validation", "test", "certify"))
    return Population(spec, train, *held)


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
