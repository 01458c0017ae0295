"""The settings that `flowdup init` chooses for what it found, as a TOML file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowdup.data.inspection import Inspection
from flowdup.data.split import share_labels
from flowdup.models import own_shapes
from flowdup.settings import toml_value

_FEW = 5  # validation clients with labels, below which a mean over them says little
_FEWEST_TO_LEARN = 10  # training clients with labels; of fewer a hypernetwork learns little
_LARGE = 30_000  # weights: smaller models learn faster, as in the preset digits-plus
_BASE = 'base = "plus"                   # FLowDUP+; what it sets: flowdup presets'
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
_SMALL_SERVER = """\
rounds = 300
alpha = 0.5                     # share of a cohort that has labels, where others learn, too
averaging = 0.9
lr_decay_fraction = 0.0
optimizer = { lr = 0.03, eps = 1e-4 }"""
_LARGE_SERVER = """\
rounds = 400
alpha = 0.5                     # share of a cohort that has labels, where others learn, too
averaging = 0.98
lr_decay_fraction = 0.0
optimizer = { lr = 2e-3, eps = 1e-9 }"""
_RUN = ("", "[run]", "evaluate_every = 25")


@dataclass(frozen=True)
class Choice:
    """Settings for what was found."""

    model: str
    weights: int  # of the model, d
    k: int
    batch_size: int
    cohort: int
    groups: dict[str, int]  # clients by group, once they are split
    labeled: dict[str, int]  # those with labels
    shift: int  # pixels; 0: inputs are no images
    square: bool  # images, as high as wide

    @classmethod
    def of(cls, found: Inspection) -> "Choice":
        """The settings that fit what was found."""
        model = choose_model(found.shape)
        shapes = own_shapes(model, found.shape, len(found.class_points))
        weights = sum(map(math.prod, shapes.values()))
        groups, labeled = _split(found)
        side = min(found.shape[1:]) if len(found.shape) == 3 else 0
        return cls(
            model,
            weights,
            k=min(10_000, _rounded(weights / 4)),
            batch_size=max(4, min(50, math.ceil(found.points["median"]))),
            cohort=min(groups["train"], max(10, min(50, groups["train"] // 5))),
            groups=groups,
            labeled=labeled,
            shift=0 if model == "mlp" else 1 if side < 16 else 2 if side < 32 else 4,
            square=len(found.shape) == 3 and found.shape[1] == found.shape[2],
        )

    @property
    def method(self) -> str:
        """The name of the method that learns last."""
        if self.labeled["train"] >= _FEWEST_TO_LEARN:
            return "flowdup-plus"
        mixed = self.labeled["train"] < self.groups["train"]
        return "fedavg-pseudo" if mixed else "fedavg"

    def remarks(self, found: Inspection) -> list[str]:
        """What follows from where labels are."""
        return [*self._few_to_learn(), *self._few_to_measure(found)]

    def _few_to_learn(self) -> list[str]:
        """A remark where one model for all is learned."""
        if self.method == "flowdup-plus":
            return []
        return [
            f"{self.labeled['train']} of {self.groups['train']} training clients have labels, and "
            f"of fewer than {_FEWEST_TO_LEARN} a hypernetwork learns little: the method is "
            f"{self.method}, one model for all; label more clients and run this again for FLowDUP+"
        ]

    @property
    def labels(self) -> str:
        """How many clients of each group have labels, in a line."""
        names = {"train": "training"}
        counts = (
            f"{self.labeled[name]} of {self.groups[name]} {names.get(name, name)}"
            for name in ("train", "validation", "test", "certify")
            if self.groups.get(name)
        )
        return f"labels: {', '.join(counts)} clients"

    def _few_to_measure(self, found: Inspection) -> list[str]:
        """A remark where few clients with labels choose the best round, or none is tested."""
        remarks = []
        validation, test = (self.groups.get(name, 0) for name in ("validation", "test"))
        known = self.labeled.get("validation", 0)
        if known < min(_FEW, validation):
            remarks.append(
                f"{known} of {validation} validation clients have labels, and the best round is "
                f"chosen by these: label more clients{self._others('validation', found)}"
            )
        if test and not self.labeled["test"]:
            remarks.append(
                f"none of {test} test clients has labels, and `flowdup evaluate` can score nobody: "
                f"label more clients{self._others('test', found)}"
            )
        return remarks

    def _others(self, group: str, found: Inspection) -> str:
        """The other remedy, and what it costs."""
        if self.labeled["train"] <= 1:
            return ""
        cost = "training then learns from fewer"
        if "all" in found.groups:
            return f", or raise data.{group}_clients ({cost})"
        return f", or move some that have labels from train to {group} ({cost})"

    def toml(self, found: Inspection, told: Sequence[str]) -> str:
        """The text of the file; `told` of the clients stands at its head."""
        lines = [*self._head(told), *self._data(found), *self._training()]
        return "\n".join(lines) + "\n"

    def _head(self, told: Sequence[str]) -> list[str]:
        lines = [f"# {line}" for line in told]
        why = {
            "mlp": "for inputs of any shape",
            "resnet18-imagenet": "for large images; slow without a GPU",
        }
        reason = why.get(self.model, "for images of this size")
        return [
            *lines,
            "# All settings and their meaning: flowdup settings",
            *([_BASE] if self.method == "flowdup-plus" else []),
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
            validation, test = self.groups["validation"], self.groups["test"]
            lines += [
                f"validation_clients = {validation:<11}# choose the best round",
                f"test_clients = {test:<17}# for `flowdup evaluate`; all others train",
            ]
        lines.append("# mean and std of the inputs are taken from the training clients")
        return [*lines, ""]

    def _training(self) -> list[str]:
        if self.method == "flowdup-plus":
            return self._personal()
        return [
            "[method]",
            f"name = {toml_value(self.method):25}# one model for all: few training labels",
            "init_scale = 0.41",
            *self._batches(),
            "clip = 1.0",
            "optimizer = { lr = 0.1 }",
            *self._cohorts(),
            _SMALL_SERVER if self.small else _LARGE_SERVER,
            *_RUN,
        ]

    def _personal(self) -> list[str]:
        """FLowDUP+ after a stage of FedAvg."""
        lines = [
            "[method]",
            f"subspace = {{ k = {self.k} }}".ljust(32) + "# numbers that tell clients apart",
            f"hypernetwork = {{ hidden = {50 if self.small else 100} }}",
            *self._batches(),
            *self._cohorts(),
        ]
        if not self.small:
            return [*lines, "# rounds = 600                  # after 400 of FedAvg", *_RUN]
        lines += ["rounds = 300", "warm_up = 0", "averaging = 0.9"]
        lines += ["optimizer = { lr = 0.01, eps = 1e-5 }", *_RUN]
        return [*lines, _SMALL_STAGE.rstrip()]

    @property
    def small(self) -> bool:
        """Whether the model is."""
        return self.weights < _LARGE

    def _batches(self) -> list[str]:
        lines = ["", "[client]", f"batch_size = {self.batch_size}"]
        if not self.shift:
            return lines
        lines += [
            f"shift = {self.shift:<24}# pixels by which training images are moved at random",
            "# mirror = true                 # if mirrored images are of the same class",
        ]
        if self.square:
            lines.append("# rotate_batches = true         # if some clients' images are rotated")
        return lines

    def _cohorts(self) -> list[str]:
        return ["", "[server]", f"cohort = {self.cohort:<23}# clients in a round"]


def _split(found: Inspection) -> tuple[dict[str, int], dict[str, int]]:
    """Clients by group, and those with labels; 15% each are validation and test clients where they
    are in no groups yet, but at least one client trains.
    """
    if "all" not in found.groups:
        return found.groups, found.labeled_groups
    validation, test = (
        max(1, min(most, round(0.15 * found.clients))) if found.clients > least else 0
        for most, least in ((100, 1), (200, 2))
    )
    groups = {
        "validation": validation,
        "test": test,
        "train": found.clients - validation - test,
    }
    return groups, share_labels(found.labeled, groups)


def choose_model(shape: tuple[int, ...]) -> str:
    """The built-in model for inputs of this shape."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        return "mlp"
    if min(shape[1:]) < 20:
        return "cnn-small"
    return "cnn" if max(shape[1:]) <= 96 else "resnet18-imagenet"


def _rounded(number: float) -> int:
    """Down to one digit: 2247 is 2000."""
    unit = 10 ** math.floor(math.log10(number))
    return int(number // unit * unit)
