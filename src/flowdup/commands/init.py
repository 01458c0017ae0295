"""The command `flowdup init`: look at a user's clients and write settings that fit them."""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flowdup.commands.options import Json
from flowdup.config import load_config, override, read_config
from flowdup.data import Population, load_population
from flowdup.data.inspection import READING, Inspection, inspect_clients
from flowdup.errors import ConfigError, DataError, printable
from flowdup.files import write_atomic
from flowdup.models import own_shapes
from flowdup.progress import Preparing
from flowdup.random import Stream
from flowdup.run.simulation import Simulation
from flowdup.settings import Table, toml_value

_FEW = 5  # clients with labels, below which a mean over them says little
_SHOWN = 12  # names of columns
_LARGE = 30_000  # weights: smaller models learn faster, as in the preset digits-plus
_SMALL_STAGE = """
[[before]]                      # FedAvg first, then FLowDUP+ from what it has learned
method = { name = "fedavg-pseudo", correction = "em", init_scale = 0.41 }
client = { optimizer = { lr = 0.1 } }

[before.server]
rounds = 300
alpha = 0.5
lr_decay_fraction = 0.0
optimizer = { lr = 0.03, eps = 1e-4 }
"""


def init(
    source: Annotated[Path, typer.Argument(help="A folder or table of clients.")],
    out: Annotated[
        Path | None, typer.Option(help="The TOML file to write; FOLDER's name if not given.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="How to read a table or CSV files, e.g. data.label_column=diagnosis"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at your clients' data and write a TOML file with settings that fit."""
    reading = _reading(settings or [])
    file = out or Path(f"{source.absolute().stem}.toml")
    if file.suffix != ".toml":
        raise ConfigError(f"{file} would not be read as settings: give --out a name with .toml")
    if file.exists():
        raise ConfigError(f"{file} exists already: choose another with --out, or remove it")
    with Preparing(quiet=as_json):
        found = inspect_clients(source, reading)
    if not found.problems:
        choice = Choice.of(found)
        write_atomic(file, choice.toml(found).encode())
        found = replace(found, remarks=[*found.remarks, *_few_labels(_check(file))])
        write_atomic(file, choice.toml(found).encode())
    facts = asdict(found) | {"file": None if found.problems else str(file)}
    if as_json:
        print(json.dumps(facts))
    else:
        _show(found, file)
    if found.problems:
        raise DataError(
            f"{source} cannot be trained on, for the reasons above: mend them and run this again"
        )


def _reading(settings: Sequence[str]) -> Table:
    """The settings of `data` that say how clients are read; ConfigError for any other."""
    table = override({}, *settings)
    read_config(table)  # refuses what is no setting
    data: Table = table.get("data", {})
    wrong = [key for key in table if key != "data"]
    wrong += [f"data.{key}" for key in data if key not in READING]
    if wrong:
        raise ConfigError(
            f"'{wrong[0]}' cannot be set here, as {', '.join(f'data.{key}' for key in READING)} "
            "can: change it in the file that is written"
        )
    return data


@dataclass(frozen=True)
class Choice:
    """Settings for what was found."""

    model: str
    weights: int  # of the model, d
    k: int
    batch_size: int
    cohort: int
    validation_clients: int
    test_clients: int
    shift: int  # pixels; 0: inputs are no images

    @classmethod
    def of(cls, found: Inspection) -> "Choice":
        """The settings that fit what was found."""
        model = choose_model(found.shape)
        shapes = own_shapes(model, found.shape, len(found.class_points))
        weights = sum(map(math.prod, shapes.values()))
        validation = test = 0
        if "all" in found.groups:  # a share of 15% each, at least one training client
            validation, test = (
                max(1, min(most, round(0.15 * found.clients))) if found.clients > least else 0
                for most, least in ((100, 1), (200, 2))
            )
        train = found.groups.get("train", found.clients - validation - test)
        side = min(found.shape[1:]) if len(found.shape) == 3 else 0
        return cls(
            model,
            weights,
            k=min(10_000, _rounded(weights / 4)),
            batch_size=max(4, min(50, math.ceil(found.points["median"]))),
            cohort=min(train, max(10, min(50, train // 5))),
            validation_clients=validation,
            test_clients=test,
            shift=0 if model == "mlp" else 1 if side < 16 else 2 if side < 32 else 4,
        )

    def toml(self, found: Inspection) -> str:
        """The text of the file, with comments."""
        return "\n".join([*self._head(found), *self._data(found), *self._training()]) + "\n"

    def _head(self, found: Inspection) -> list[str]:
        lines = [f"# {line}" for line in describe(found)]
        why = {
            "mlp": "for inputs of any shape",
            "resnet18-imagenet": "for large images; slow without a GPU",
        }
        reason = why.get(self.model, "for images of this size")
        return [
            *lines,
            "# All settings and their meaning: flowdup settings",
            'base = "plus"                   # FLowDUP+; what it sets: flowdup presets',
            f"model = {toml_value(self.model):24}# {reason}; {self.weights:,} weights",
            "",
        ]

    def _data(self, found: Inspection) -> list[str]:
        lines = [
            "[data]",
            f"source = {toml_value(found.source)}",
            f"path = {toml_value(found.path)}",
            *(f"{key} = {toml_value(value)}" for key, value in found.reading.items()),
        ]
        if not found.class_names:
            lines.append(f"classes = {len(found.class_points)}")
            lines.append('# class_names = ["...", "..."]    # of class 0, 1, ..., for predictions')
        if "all" in found.groups:
            lines += [
                f"validation_clients = {self.validation_clients:<11}# choose the best round",
                f"test_clients = {self.test_clients:<17}# for `flowdup evaluate`; all others train",
            ]
        lines.append("# mean and std of the inputs are taken from the training clients")
        return [*lines, ""]

    def _training(self) -> list[str]:
        small = self.weights < _LARGE
        lines = [
            "[method]",
            f"subspace = {{ k = {self.k} }}".ljust(32) + "# numbers that tell clients apart",
            f"hypernetwork = {{ hidden = {50 if small else 100} }}",
            "",
            "[client]",
            f"batch_size = {self.batch_size}",
        ]
        if self.shift:
            lines += [
                f"shift = {self.shift:<24}# pixels by which training images are moved at random",
                "# mirror = true                 # if mirrored images are of the same class",
            ]
        lines += ["", "[server]", f"cohort = {self.cohort:<23}# clients in a round"]
        if small:
            lines += ["rounds = 300", "warm_up = 0", "averaging = 0.9"]
            lines.append("optimizer = { lr = 0.01, eps = 1e-5 }")
        else:
            lines.append("# rounds = 600                  # after 400 of FedAvg")
        lines += ["", "[run]", "evaluate_every = 25"]
        return [*lines, _SMALL_STAGE.rstrip()] if small else lines


def choose_model(shape: tuple[int, ...]) -> str:
    """The built-in model for inputs of this shape."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        return "mlp"
    if min(shape[1:]) < 20:
        return "cnn-small"
    return "cnn" if max(shape[1:]) <= 96 else "resnet18-imagenet"


def describe(found: Inspection) -> list[str]:
    """One line per fact, then those that are odd; all can be printed."""
    groups = "" if "all" in found.groups else f" ({_counts(found.groups)})"
    points = {name: f"{number:g}" for name, number in found.points.items()}
    names = found.class_names or tuple(map(str, range(len(found.class_points))))
    share = sorted(zip(found.class_points, names, strict=True), reverse=True)
    whole = sum(found.class_points) or 1
    shown = ", ".join(
        f"{json.dumps(name, ensure_ascii=False)} {100 * n / whole:.0f}%" for n, name in share[:10]
    )
    lines = [
        f"{found.clients} clients{groups}, {found.labeled} with labels; "
        f"points per client: {_counts(points)}",
        f"inputs: {found.dtype} {list(found.shape)}{_columns(found.columns)}",
        f"{len(found.class_points)} classes, {found.classes_per_client:g} at a typical client: "
        f"{shown}{' and others' if len(share) > 10 else ''}",
        *(f"note: {text}" for text in found.remarks),
    ]
    return [printable(line) for line in lines]


def _columns(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f", the columns {', '.join(names[:_SHOWN])}{more}" if names else ""


def _counts(table: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in table.items())


def _rounded(number: float) -> int:
    """Down to one digit: 2247 is 2000."""
    unit = 10 ** math.floor(math.log10(number))
    return int(number // unit * unit)


def _check(file: Path) -> Population:
    """Load the clients and build all stages; what is refused leaves no file behind."""
    try:
        config = load_config(str(file))
        population = load_population(config.data, Stream(config.seed).child("data"))
        Simulation(config, population, stage=0).check_later_stages(config)
        return population
    except BaseException:
        file.unlink()
        raise


def _few_labels(population: Population) -> list[str]:
    """A remark where few clients with labels choose the best round, or are tested."""
    remarks = []
    for group, clients in (("validation", population.validation), ("test", population.test)):
        labeled = sum(client.labeled for client in clients)
        if labeled < min(_FEW, len(clients)):
            remarks.append(
                f"{labeled} of {len(clients)} {group} clients have labels, and what is measured "
                f"rests on these: raise data.{group}_clients, or label more"
            )
    return remarks


def _show(found: Inspection, file: Path) -> None:
    console = Console()
    lines = describe(found) + [f"must be mended: {text}" for text in found.problems]
    if not found.problems:
        words = ("flowdup", "train", str(file), "--out", f"runs/{file.stem}")
        lines.append(f"{file} is written: {shlex.join(words)}")
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)
