"""The laws that every method keeps, tried on small clients: `flowdup check`.

A law is one function of a case; its docstring is the law.  A broken one raises LawBrokenError with
what was measured.  The project's own methods are held to the same list.
"""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad

from flowdup.batches import batch_plan, local_batches
from flowdup.checkpoint import load_checkpoint, save_checkpoint
from flowdup.client import ClientConfig, ClientUpdate
from flowdup.config import override
from flowdup.engines import EngineConfig, build_engine
from flowdup.errors import ConfigError, FlowdupError
from flowdup.federation_spec import FederationSpec
from flowdup.law_cases import SPEC, Case, noise
from flowdup.messages import Task
from flowdup.methods import METHODS, Batch, MethodConfig
from flowdup.models import Weights
from flowdup.optimizers import OptimizerConfig
from flowdup.random import Stream
from flowdup.registry import import_modules
from flowdup.server import ServerConfig, ServerState, initial_state, train

_CPU, _EXACT = torch.device("cpu"), torch.float64
_ZERO = torch.zeros((), dtype=_EXACT)


class LawBrokenError(FlowdupError):
    """A method breaks a law; the sentence says which number shows it."""


def gradient(case: Case) -> None:
    """The gradient of the loss is that of finite differences."""
    for labeled in (True, False):
        batch, step = case.batch(case.batch_size - 1, labeled), 1e-6
        found = grad(lambda psi, batch=batch: case.loss(batch, psi))(case.psi)
        for number in range(4):
            draw = Stream(number).child("direction")
            along = {n: noise(draw.child(n), p) for n, p in case.psi.items()}
            ahead, behind = (
                float(case.loss(batch, {n: p + s * step * along[n] for n, p in case.psi.items()}))
                for s in (1, -1)
            )
            wanted = (ahead - behind) / (2 * step)
            slope = sum(float((found[n] * along[n]).sum()) for n in found)
            if abs(slope - wanted) > 1e-4 * abs(wanted) + 1e-7:
                raise LawBrokenError(
                    f"along a random direction the loss changes by {wanted:.6g}, its gradient "
                    f"says {slope:.6g}"
                )


def engines(case: Case) -> None:
    """Both engines give the same psi."""
    server = ServerConfig(3, 4, 0.6, optimizer=OptimizerConfig("sgd", 0.5))
    client = ClientConfig(2, case.batch_size, 0.5, OptimizerConfig("sgd", 0.02))
    start = initial_state(server, case.built, Stream(case.seed), _CPU, _EXACT)
    ends = []
    for name in ("sequential", "batched"):
        config = EngineConfig(name, "cpu", "float64")
        engine = build_engine(config, case.built, client, case.clients(), Stream(case.seed))
        *_, last = train(server, case.built, engine, start, Stream(case.seed))
        ends.append(last.state.psi)
    if (apart := _distance(*ends)) > 1e-9:
        raise LawBrokenError(f"after three rounds psi differs by {apart:.2g} between the engines")


def order(case: Case) -> None:
    """The order of a set does not matter: not of the unlabeled points, not inside a half-batch."""
    x = case.client(9, case.batch_size).x
    mixed = torch.from_numpy(Stream(case.seed).child("mixed").permutation(len(x)))
    if (apart := _distance(case.personalize(x), case.personalize(x[mixed]))) > 1e-9:
        raise LawBrokenError(
            f"the same points in another order give weights that differ by {apart:.2g}"
        )
    batch = case.batch(case.batch_size)
    other = _join(_mixed(half, Stream(case.seed).child("half")) for half in batch.halves())
    if (apart := float((case.loss(batch) - case.loss(other)).abs())) > 1e-9:
        raise LawBrokenError(
            f"the loss changes by {apart:.2g} when the points of each half-batch change places"
        )


def padding(case: Case) -> None:
    """Rows that are no data do not matter."""
    x = case.client(9, case.batch_size - 3).x
    present = torch.cat([torch.ones(len(x)), torch.zeros(3)]).to(_EXACT)
    padded = case.personalize(torch.cat([x, case.client(8, 3).x]), present)
    if (apart := _distance(case.personalize(x), padded)) > 1e-9:
        raise LawBrokenError(f"three rows of padding change a model's weights by {apart:.2g}")
    batch = case.batch(case.batch_size - 3)
    absent = batch.present == 0
    other = batch._replace(
        x=torch.where(absent[:, None, None, None], 255 - batch.x, batch.x),
        y=torch.where(absent, 1 - batch.y, batch.y).clamp(min=0),
    )
    if (apart := float((case.loss(batch) - case.loss(other)).abs())) > 1e-9:
        raise LawBrokenError(f"what stands in rows of padding changes the loss by {apart:.2g}")


def labels(case: Case) -> None:
    """A label that a client does not have is never read."""
    batch = case.batch(case.batch_size)
    some = batch._replace(labeled=batch.labeled * (torch.arange(len(batch.y)) % 2))
    hidden = torch.where(some.labeled > 0, some.y, (some.y + 1) % SPEC.classes)
    if (apart := float((case.loss(some) - case.loss(some._replace(y=hidden))).abs())) > 1e-9:
        raise LawBrokenError(f"labels of unlabeled points change the loss by {apart:.2g}")


def unlabeled(case: Case) -> None:
    """A client without labels teaches only a method that says so (`learns_unlabeled`)."""
    batch = case.batch(case.batch_size, labeled=False)
    found = grad(lambda psi: case.loss(batch, psi))(case.psi)
    largest = max(float(g.abs().max()) for g in found.values())
    if largest > 0 and not case.built.learns_unlabeled:
        raise LawBrokenError(
            f"learns_unlabeled is false, but the gradient of a client without labels is up to "
            f"{largest:.2g}"
        )


def weights(case: Case) -> None:
    """A personal model and that for everyone, if there is one, are finite weights of the model."""
    models = [case.personalize(case.client(9, case.batch_size).x), _global_model(case)]
    for found in filter(None, models):
        shapes, wanted = {n: tuple(w.shape) for n, w in found.items()}, case.built.f.shapes
        for name in shapes | wanted:
            if shapes.get(name) != wanted.get(name):
                raise LawBrokenError(
                    f"'{name}' has the shape {shapes.get(name)}, in the model {wanted.get(name)}"
                )
        for name, weight in found.items():
            if not bool(torch.isfinite(weight).all()):
                raise LawBrokenError(f"'{name}' has NaN or infinite numbers")


def _global_model(case: Case) -> Weights:
    """Empty if the method has none."""
    try:
        return case.built.global_model(case.deployed)
    except FlowdupError as error:
        if case.built.interpolates:
            raise LawBrokenError(f"interpolates is true, but there is no end: {error}") from None
        return {}


def seed(case: Case) -> None:
    """The seed alone decides where training starts, and no global random state is read or moved."""
    before = _global_random_state()
    again = replace(case)
    starts = [c.built.init(Stream(case.seed).child("psi")) for c in (case, again)]
    again.loss(again.batch(again.batch_size))
    again.personalize(again.client(9, again.batch_size).x)
    if before != _global_random_state():
        raise LawBrokenError("building or using the method moves a global random state")
    if (apart := _distance(*starts)) > 0:
        raise LawBrokenError(f"the same seed gives a psi that differs by {apart:.2g}")


def factors(case: Case) -> None:
    """Matrices named in `rank_one` get the update that they get as whole matrices."""
    config = ClientConfig(1, case.batch_size, 0.5, OptimizerConfig("sgd", 0.02))
    plan = batch_plan(Stream(case.seed), 0, 2 * case.batch_size + 3, 1, case.batch_size)
    batches = local_batches(case.client(9, 2 * case.batch_size + 3), plan, _CPU, _EXACT)
    task = Task(1, case.psi, case.broadcast, {0: 0})
    update = ClientUpdate.for_task(case.built, config, task, Batch(*(t[0] for t in batches)))
    whole = ClientUpdate(case.built, config)
    apart = _distance(*(u(task, batches).whole_delta() for u in (update, whole)))
    if apart > 1e-10:
        raise LawBrokenError(f"the update by factors is {apart:.2g} from the one by matrices")


def checkpoint(case: Case) -> None:
    """A checkpoint brings back the same psi and the same personal models."""
    table = case.method.table()
    spec = FederationSpec.of(case.seed, case.model, table, SPEC, case.built)
    with TemporaryDirectory() as folder:
        before = ServerState(1, case.psi, {}, case.built.server_state())
        before = replace(before, correction=case.correction, start=case.start)
        save_checkpoint(Path(folder), spec, before)
        found, state = load_checkpoint(Path(folder))
    again = replace(case, method=MethodConfig.from_table(found.method))
    found.check(again.built)
    if _distance(state.method_state, case.built.server_state()) > 0:
        raise LawBrokenError("the method's server state comes back changed")
    x = case.client(9, case.batch_size).x
    with torch.no_grad():
        model = again.built.personalize(state.deployed, x, torch.ones(len(x), dtype=_EXACT))
    if _distance(state.deployed, case.deployed) > 0 or _distance(model, case.personalize(x)) > 0:
        raise LawBrokenError("what was saved and loaded again gives other weights")


LAWS: dict[str, Callable[[Case], None]] = {
    law.__name__: law
    for law in (
        gradient,
        engines,
        order,
        padding,
        labels,
        unlabeled,
        weights,
        seed,
        factors,
        checkpoint,
    )
}


OF_MODELS = ("order", "padding", "weights", "checkpoint")  # laws about personal models


def read_cases(module: str, model: str, settings: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """The methods that a user's module defines, or the one of that name; `method.KEY=VALUE`."""
    names = [module] if module in METHODS else methods_of(module)
    if not names:
        raise ConfigError(f"{module} registers no method: call flowdup.register_method in it")
    for name in names:
        table = override({"method": {"name": name}}, *settings)
        if table.keys() != {"method"}:
            raise ConfigError("only settings of the method can change here: --set method.KEY=VALUE")
        case = Case(MethodConfig.from_table(table["method"]), model)
        case.psi  # noqa: B018  (what cannot be built breaks no law)
        yield name, case


def methods_of(module: str) -> list[str]:
    """Names of the methods that a file or module registers when it is imported."""
    import_modules([module])
    own = Path(module).stem if module.endswith(".py") else module
    return [
        name
        for name, entry in METHODS.items()
        if entry.method.__module__ == own or entry.method.__module__.startswith(f"{own}.")
    ]


class Verdict(NamedTuple):
    """What came of one law for one method."""

    law: str
    text: str  # the law itself
    broken: str  # what was measured; empty: the law is kept


def check_method(case: Case) -> Iterator[Verdict]:
    """Every law in turn.  An error that the method raises breaks the law that was tried."""
    for name, law in LAWS.items():
        text = (inspect.getdoc(law) or "").partition("\n")[0]
        tried = ((said, _broken(law, other)) for said, other in variants(case, name))
        yield Verdict(name, text, next((said + why for said, why in tried if why), ""))


def variants(case: Case, law: str) -> Iterator[tuple[str, Case]]:
    """What a law is tried on, with words for it: the case, the same after a stage before, and with
    a correction where the law is about models; without what the method refuses to be.
    """
    yield "", case
    if not _is_refused(begun := replace(case, begun=True)):
        yield "begun from a model's weights, ", begun
    table = case.method.table() | {"correction": "em"}
    corrected = replace(case, method=MethodConfig.from_table(table))
    if law in OF_MODELS and corrected != case and not _is_refused(corrected):
        yield "with method.correction = 'em', ", corrected


def _is_refused(case: Case) -> bool:
    try:
        return case.built is None
    except ConfigError:
        return True
    except Exception:  # the law that is tried will say so
        return False


def _broken(law: Callable[[Case], None], case: Case) -> str:
    """What was measured; empty if the law is kept."""
    try:
        law(case)
    except LawBrokenError as error:
        return str(error)
    except Exception as error:  # whatever a user's method may raise
        return f"the method raised {type(error).__name__}: {error}"
    return ""


def _global_random_state() -> tuple[object, ...]:
    """Of torch, NumPy and Python."""
    name, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), name, list(words), rest, random.getstate()


def _mixed(batch: Batch, draw: Stream) -> Batch:
    rows = torch.from_numpy(draw.permutation(len(batch.y)))
    return Batch(*(t[rows] for t in batch))


def _join(halves: Iterator[Batch]) -> Batch:
    return Batch(*(torch.cat(parts) for parts in zip(*halves, strict=True)))


def _distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference, NaN counting as infinite."""
    if a.keys() != b.keys():
        return float("inf")
    pairs = [(a[n].double(), b[n].double()) for n in a]
    apart = torch.stack([_ZERO, *((x - y).abs().max() for x, y in pairs if not _same(x, y))])
    return float(torch.nan_to_num(apart, nan=float("inf")).max())


def _same(a: Tensor, b: Tensor) -> bool:
    """To the bit, NaN where NaN is."""
    return bool(torch.equal(torch.isnan(a), torch.isnan(b))) and torch.equal(
        torch.nan_to_num(a), torch.nan_to_num(b)
    )
