"""A trial of a user's model or method before training: whether `vmap` can run it, and whether it
draws random numbers.

It is made with numbers of its own when an engine is built, so that a run, the same run resumed and
its evaluation all find the same.  What flowdup defines itself is known and not tried.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from flowdup import tree
from flowdup.accelerate.torch_private import BUILDING
from flowdup.errors import ConfigError, shorten
from flowdup.methods import METHODS, Batch, Method
from flowdup.models import MODELS
from flowdup.params import Params
from flowdup.random import Stream

_CLIENTS, _ROWS = 2, 4  # of a trial

Function = Callable[..., Any]


def is_user_defined(method: Method) -> bool:
    """Whether the method, or a network that it may have, can be other than flowdup's own."""
    definitions = (type(method), *(m.method for m in METHODS.values()), *MODELS.values())
    return not all(d.__module__.startswith("flowdup.") for d in definitions)


def why_not_vmap(method: Method, device: torch.device, dtype: torch.dtype) -> str:
    """What `vmap` says to a step or a prediction that runs for one client alone; empty if nothing.

    What fails for one client, too, is left for training to tell.  ConfigError if a random number
    is drawn: from torch's global generator, which no seed of a run decides.
    """
    reason = ""
    with BUILDING, warnings.catch_warnings(action="ignore"):  # of batching rules that are missing
        for function, arguments in _works(method, device, dtype):
            one = tree.map(lambda t: t[0], arguments)
            if _error(partial(_run_undrawn, function, one, device)) is None:
                error = _error(partial(vmap(function), *arguments))
                reason = reason or ("" if error is None else _first_line(error))
    return reason


def _works(
    method: Method, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[Function, tuple[Any, ...]]]:
    """What an engine has clients do, with arguments for some of them."""
    draw, rows, shape = Stream(0), method.batch_size or _ROWS, method.f.inputs
    psi = {n: p.to(device, dtype) for n, p in method.init(draw.child("psi")).items()}
    state = method.server_state()
    start = psi | {n: state[n].to(device, dtype) for n in method.broadcast}
    numbers = draw.uniform(_CLIENTS * rows * torch.Size(shape).numel())
    x = torch.from_numpy(numbers).reshape(_CLIENTS, rows, *shape).to(device)
    y = torch.zeros(_CLIENTS, rows, dtype=torch.int64, device=device)
    present = torch.ones(_CLIENTS, rows, dtype=dtype, device=device)
    each: Params = {n: p.expand(_CLIENTS, *p.shape) for n, p in psi.items()}

    def gradient(psi: Params, *batch: Tensor) -> Any:
        return grad(lambda psi: method.loss(psi, Batch(*batch), start))(psi)

    @torch.no_grad()
    def logits(x: Tensor, present: Tensor) -> Tensor:
        return method.logits(psi, x, present, x)

    @torch.no_grad()
    def labels(x: Tensor, y: Tensor, present: Tensor) -> Tensor:
        return method.labels(start, x, y, present)

    yield gradient, (each, x, y, present, present)
    yield logits, (x, present)
    if method.relabels:
        yield labels, (x, y - 1, present)


def _run_undrawn(function: Function, arguments: Any, device: torch.device) -> None:
    """Run it; ConfigError if it moved a generator of torch, which is as before in any case."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        before = _generators(device)
        function(*arguments)
        if not all(map(torch.equal, before, _generators(device))):
            raise ConfigError(
                "the model draws random numbers when it is called, so no seed would give a run "
                "again: use nn.Dropout, or training=self.training in torch.nn.functional.dropout"
            )


def _generators(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _error(work: Callable[[], Any]) -> Exception | None:
    try:
        work()
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever torch or a user's model may raise
        return error
    return None


def _first_line(error: Exception) -> str:
    return shorten(str(error).strip().partition("\n")[0] or type(error).__name__, 160)
