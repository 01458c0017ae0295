"""Settings of `data`, and which of them a source has no use for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite

from flowdup.data.labels import LabeledTraits
from flowdup.errors import ConfigError
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
    classes: int = 0  # how many there are; 0: the largest label + 1, or as many as have names
    class_names: tuple[str, ...] = ()  # of class 0, 1, ..., where labels are numbers
    shape: tuple[int, ...] = ()  # table or CSV: of one input, if its columns are flat
    client_column: str = "client"  # table or CSV: names the client of each row
    label_column: str = "label"  # table or CSV: the class of each row; empty: there are no labels
    input_columns: tuple[str, ...] = ("x",)  # table or CSV; where x is a column of numbers, or a
    # CSV has none: all columns of numbers
    normalize: bool = True  # where mean and std are empty: by those of the training clients' inputs
    # per channel, from sums, not data, or of `start`; lazy clients have those of `start` alone
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


def _refuse(config: DataConfig, settings: Mapping[str, str], why: str) -> None:
    given = [f"data.{name} = {unset}" for name, unset in settings.items() if getattr(config, name)]
    if given:
        raise ConfigError(f"data.source = '{config.source}' {why}: set {' and '.join(given)}")


def refuse_recipe(config: DataConfig) -> None:
    """Refuse settings of simulated clients where clients are given."""
    _refuse(config, _FOR_RECIPES, "has clients of its own, which are not made by a recipe")


def refuse_description(config: DataConfig) -> None:
    """Refuse settings that describe inputs where these are known."""
    why = "is a public set, whose inputs and classes are known and which lies in FLOWDUP_DATA"
    _refuse(config, _FOR_OWN_CLIENTS, why)
