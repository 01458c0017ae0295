"""Every method keeps every law, and a method with a bug breaks the law that names it."""

import random

import pytest
import small
import torch
from torch import Tensor

from flowdup.errors import FlowdupError
from flowdup.law_cases import Case
from flowdup.laws import LAWS, OF_MODELS, check_method, variants
from flowdup.methods import (
    METHODS,
    Batch,
    Method,
    MethodConfig,
    MethodContext,
    NoSettings,
    Params,
    register_method,
)
from flowdup.methods.base import mean_loss
from flowdup.methods.fedavg import FedAvg
from flowdup.methods.flowdup import FLowDUP, FLowDUPConfig
from flowdup.models.network import Weights
from flowdup.random import Stream


def test_every_registered_method_is_tried_here() -> None:
    ours = {n for n, entry in METHODS.items() if entry.method.__module__.startswith("flowdup.")}
    assert ours == {table["name"] for table in small.METHODS.values()}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", small.METHODS)
def test_every_method_keeps_every_law(name: str, law: str) -> None:
    LAWS[law](Case(MethodConfig.from_table(small.METHODS[name])))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ["flowdup-plus", "fedavg-pseudo"])
def test_a_method_that_uses_the_model_of_a_stage_before_keeps_every_law(
    name: str, law: str
) -> None:
    LAWS[law](Case(MethodConfig.from_table(small.METHODS[name]), begun=True))


@pytest.mark.parametrize("law", OF_MODELS)
@pytest.mark.parametrize("name", small.METHODS)
def test_corrected_models_keep_the_laws_of_models(name: str, law: str) -> None:
    table = small.METHODS[name] | {"correction": "none"}
    tried = dict(variants(Case(MethodConfig.from_table(table)), law))
    said = "with method.correction = 'em', "
    assert (said in tried) == (name != "lame")
    if said in tried:
        assert tried[said].built.is_corrected
        LAWS[law](tried[said])


def test_a_law_is_tried_on_all_that_a_method_can_be() -> None:
    def tried(name: str, law: str) -> list[str]:
        case = Case(MethodConfig.from_table({"name": name}))
        return [said.partition(" ")[0] for said, _ in variants(case, law)]

    assert tried("fedavg", "order") == ["", "begun", "with"]
    assert tried("fedavg", "gradient") == ["", "begun"]  # training is the method's own
    assert tried("arm-cml", "order") == ["", "with"]
    assert tried("lame", "order") == ["", "begun"]


class WrongBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return g * x  # without the 2


class WrongGradient(FedAvg):
    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        last = [*params.values()][-1]
        known = batch.labeled.sum().clamp(max=1)
        return super().loss(params, batch, start) + known * WrongBackward.apply(last).sum()


class FirstPointCounts(FedAvg):
    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        name = [*params][-1]
        return params | {name: params[name] + self.f.read(x)[0].mean()}


class EarlyRowsCount(FedAvg):
    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        weight = torch.arange(len(batch.y), 0, -1).to(batch.present)
        return mean_loss(self.f(params, batch.x), batch._replace(labeled=batch.labeled * weight))


class PaddingCounts(FedAvg):
    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        name = [*params][-1]
        return params | {name: params[name] + self.f.read(x).mean()}


class NotANumberBesidePadding(FedAvg):
    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return {n: p * present.min() / present.min() for n, p in params.items()}


class HiddenLabelsCount(FedAvg):
    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return mean_loss(self.f(params, batch.x), batch._replace(labeled=batch.present))


class UnlabeledTeach(FedAvg):
    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return super().loss(params, batch, start) + [*params.values()][-1].square().sum()


class TooFewWeights(FedAvg):
    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return {n: p for n, p in params.items() if not n.endswith("bias")}


class NotANumber(FedAvg):
    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return {n: p / 0 * 0 for n, p in params.items()}


class RandomStart(FedAvg):
    def init(self, stream: Stream) -> Params:
        return {n: p + random.random() for n, p in super().init(stream).items()}


class GlobalState(FedAvg):
    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        torch.rand(1)
        return super().loss(params, batch, start)


class CountsItsCalls(FedAvg):
    """Of which a batched engine makes fewer than one that takes clients one by one."""

    calls = 0

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        self.calls += 1
        pull = [*params.values()][-1].square().sum() * batch.labeled.sum()
        return super().loss(params, batch, start) + self.calls * pull


class HalfTheFactor(FLowDUP):
    """Takes its gradient by h2's matrix from two places, one of them hidden from the factors."""

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        matrix = params["h2.output.weight"]
        base = matrix if isinstance(matrix, Tensor) else matrix.base
        return super().loss(params, batch, start) + base.sum() * batch.present.sum()


class NotInTheCheckpoint(FedAvg):
    """Keeps something that no checkpoint has."""

    made = 0

    def __init__(self, config: NoSettings, context) -> None:  # type: ignore[no-untyped-def]
        super().__init__(config, context)
        NotInTheCheckpoint.made += 1
        self.own = NotInTheCheckpoint.made

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        return {n: p + self.own for n, p in params.items()}


class UnlabeledTeachOnceBegun(FedAvg):
    """Only after a stage before."""

    def __init__(self, config: NoSettings, context: MethodContext) -> None:
        super().__init__(config, context)
        self.before = context.start_here()

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        pulls = [(params[n] - w).square().sum() for n, w in self.before.items()]
        return super().loss(params, batch, start) + sum(pulls)


class InterpolatesFromNothing(FedAvg):
    interpolates = True

    def global_model(self, params: Params) -> Weights:
        raise FlowdupError("there is none: train another method")


BUGS: dict[str, list[type[Method]]] = {
    "gradient": [WrongGradient],
    "engines": [CountsItsCalls],
    "order": [FirstPointCounts, EarlyRowsCount],
    "padding": [PaddingCounts, NotANumberBesidePadding],
    "labels": [HiddenLabelsCount],
    "unlabeled": [UnlabeledTeach, UnlabeledTeachOnceBegun],
    "weights": [TooFewWeights, NotANumber, InterpolatesFromNothing],
    "seed": [RandomStart, GlobalState],
    "factors": [HalfTheFactor],
    "checkpoint": [NotInTheCheckpoint],
}


def test_every_law_has_a_bug_that_breaks_it() -> None:
    assert BUGS.keys() == LAWS.keys()


@pytest.mark.parametrize(("law", "bug"), [(law, bug) for law in BUGS for bug in BUGS[law]])
def test_a_method_with_a_bug_breaks_the_law_that_names_it(law: str, bug: type[Method]) -> None:
    name = f"bug-{bug.__name__}"
    settings = FLowDUPConfig if issubclass(bug, FLowDUP) else NoSettings
    register_method(name, bug, settings)
    small_settings = small.METHODS["flowdup"] if settings is FLowDUPConfig else {}
    case = Case(MethodConfig.from_table(small_settings | {"name": name}))
    broken = {v.law: v.broken for v in check_method(case) if v.broken}
    assert law in broken
    assert broken[law]


def test_a_method_that_raises_breaks_the_law_that_was_tried() -> None:
    case = Case(MethodConfig("fedavg", NoSettings()), "no-such-model")
    assert all("no-such-model" in verdict.broken for verdict in check_method(case))
