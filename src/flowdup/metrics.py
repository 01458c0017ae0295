"""Metrics of one client's predictions, by name; a metric of one's own is a function and a line."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flowdup.errors import ConfigError
from flowdup.registry import Registry

_BINS = 15

MetricFunction = Callable[[Tensor, Tensor], float]  # logits [n, C] float64, y [n] -> one client's


def accuracy(logits: Tensor, y: Tensor) -> float:
    """The share of points whose largest logit is their label's, in percent."""
    return 100.0 * float((logits.argmax(1) == y).double().mean())


def nll(logits: Tensor, y: Tensor) -> float:
    """Negative log-likelihood of the labels, mean over points, in nats; infinite for NaN logits."""
    value = float(cross_entropy(logits, y))
    return math.inf if math.isnan(value) else value


def calibration_error(logits: Tensor, y: Tensor) -> float:
    """Expected calibration error, in percent: |accuracy - confidence| in 15 bins of equal width,
    weighted by their points (Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural
    Networks", ICML 2017).

    Of few points it is mostly noise, and never 0: compare it on the same clients only.
    """
    confidence, answer = logits.softmax(1).max(1)
    bins = (confidence * _BINS).ceil().long().clamp(1, _BINS) - 1  # bin b is (b/15, (b+1)/15]
    gap = (answer == y).double() - confidence
    return 100.0 * float(gap.new_zeros(_BINS).index_add_(0, bins, gap).abs().sum() / len(y))


def macro_f1(logits: Tensor, y: Tensor) -> float:
    """F1 = 2 TP / (2 TP + FP + FN), mean over classes, in percent.

    The classes are those among the client's labels or its predictions, as in scikit-learn.  Beware:
    one stray prediction of a class that the client lacks is a class with F1 0, which weighs much
    where clients have few classes.
    """
    answer, classes = logits.argmax(1), logits.shape[1]
    of_both = torch.bincount(y, minlength=classes) + torch.bincount(answer, minlength=classes)
    right = torch.bincount(y[answer == y], minlength=classes)
    there = of_both > 0  # 2 TP + FP + FN
    return 100.0 * float((2 * right[there] / of_both[there].double()).mean())


@dataclass(frozen=True)
class Metric:
    """A function of a client's logits [n, classes] and labels [n], and how to read its value."""

    function: MetricFunction
    higher_is_better: bool = True
    unit: str = ""


METRICS = Registry(
    "metric",
    {
        "accuracy": Metric(accuracy, unit="%"),
        "nll": Metric(nll, higher_is_better=False, unit="nats"),
        "calibration_error": Metric(calibration_error, higher_is_better=False, unit="%"),
        "macro_f1": Metric(macro_f1, unit="%"),
    },
)


def register_metric(
    name: str, function: MetricFunction, higher_is_better: bool = True, unit: str = ""
) -> None:
    """Add a metric of one's own: a function of one client's logits [n, C] and labels y [n], on the
    CPU, only points with a label.

    Every evaluation from then on has it.  NaN says that it is not defined for these points: the
    client is then left out of means, as one without labels is.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ConfigError(
            f"a metric cannot be named '{name}': use small letters, digits and underscores"
        )
    METRICS.register(name, Metric(function, higher_is_better, unit))
