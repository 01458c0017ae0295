"""Every private, experimental or deprecated name of torch that flowdup uses, in one place.

Each is looked up when it is first needed, and each has a plain fallback: where torch has changed,
or where FLOWDUP_WITHOUT names the piece ("make_fx,triton"), flowdup becomes slower and warns once.
No other file may use such a name; a test reads them all.
"""

import importlib
import inspect
import linecache
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from flowdup.errors import ConfigError

SWITCH = "FLOWDUP_WITHOUT"  # an environment variable: names of pieces to do without, by commas


class Piece(NamedTuple):
    """Where a name stands, and what happens without it."""

    module: str
    attribute: str  # empty: the module itself
    fallback: str
    keywords: tuple[str, ...] = ()  # that flowdup passes

    def find(self) -> Any:
        """The piece, if it is there as flowdup knows it; else an error."""
        found: Any = importlib.import_module(self.module)
        if self.attribute:
            found = getattr(found, self.attribute)
        if self.keywords:
            known = inspect.signature(found).parameters
            unknown = [keyword for keyword in self.keywords if keyword not in known]
            if unknown:
                raise TypeError(f"it does not take {', '.join(unknown)}")
        return found


_INDUCTOR = "torch._inductor"
_NOT_COMPILED = "steps on a GPU are captured without being compiled, which is slower"
_IN_PYTHON = "traced steps on a CPU run in Python, which is slower"
_ONE_BY_ONE = "tensors are taken one by one, which is slower"

PIECES = {
    "make_fx": Piece(
        "torch.fx.experimental.proxy_tensor",
        "make_fx",
        "steps run as they are written, which is slower",
        ("tracing_mode", "_allow_non_fake_inputs"),
    ),
    "_loader": Piece("torch.fx.graph_module", "_loader", "the text of every trace stays in memory"),
    "fx_graph_cse": Piece(
        "torch._functorch.compile_utils",
        "fx_graph_cse",
        "traced steps do some things twice, which is slower",
    ),
    "standalone_compile": Piece(
        _INDUCTOR, "standalone_compile", _NOT_COMPILED, ("dynamic_shapes", "options")
    ),
    "force_stride_order": Piece(f"{_INDUCTOR}.inductor_prims", "force_stride_order", _NOT_COMPILED),
    "CompilationUnit": Piece("torch.jit", "CompilationUnit", _IN_PYTHON),
    "optimized_execution": Piece("torch.jit._fuser", "optimized_execution", _IN_PYTHON),
    "_foreach_copy_": Piece("torch", "_foreach_copy_", _ONE_BY_ONE),
    "_foreach_zero_": Piece("torch", "_foreach_zero_", _ONE_BY_ONE),
    "_dynamo": Piece("torch._dynamo", "", "torch imports it where it needs it"),
    "triton": Piece(
        "triton.language", "", "a cohort's layers are torch's own on a GPU, too, which is slower"
    ),
}

INDUCTOR_OPTIONS: dict[str, Any] = {  # names in `torch._inductor.config`
    "shape_padding": False,  # what profits from it is padded already (`subspace.py`)
    "comprehensive_padding": False,  # likewise; with gaps in P v, indices took 10 s to simplify
    "triton.autotune_at_compile_time": False,  # the first run does that
    "triton.autotune_pointwise": False,  # 2 % faster steps are not worth 10 s of ResNet18's first
    "max_fusion_buffer_group_pairwise_attempts": 4,  # 64 take longer and find hardly more
}

# Held while a program is made: tracing patches `nn.Module` for all threads, warnings are filtered
# for all of them, and one thread at a time may capture a CUDA graph.
BUILDING = threading.RLock()

_found: dict[str, Any] = {}


def look_up(name: str) -> Any | None:
    """The piece of this name; None, and one warning per process, if it cannot be used."""
    if name in _found:
        return _found[name]
    with BUILDING:
        if name not in _found:
            _found[name] = _find(name)
        return _found[name]


def _find(name: str) -> Any | None:
    piece = PIECES[name]
    if name in switched_off():
        _warn(name, f"{SWITCH} switches it off", piece.fallback)
        return None
    try:
        with _no_torchscript_warnings():
            return piece.find()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _warn(name, str(error), piece.fallback)
        return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _warn(name: str, reason: str, fallback: str) -> None:
    text = f"flowdup does without {name} (torch {torch.__version__}: {reason}): {fallback}"
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def switched_off() -> list[str]:
    """What FLOWDUP_WITHOUT names."""
    names = [name.strip() for name in os.environ.get(SWITCH, "").split(",") if name.strip()]
    for name in names:
        if name not in PIECES:
            raise ConfigError(
                f"{SWITCH} names '{name}', which is no piece: use some of {', '.join(PIECES)}"
            )
    return names


def trace(function: Callable[..., Any], tensors: Sequence[Tensor]) -> GraphModule | None:
    """The operations that function(*tensors) does, transforms like `vmap` resolved."""
    make_fx = look_up("make_fx")
    if make_fx is None:
        return None
    with BUILDING:
        try:
            tracer = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)
            traced: GraphModule = tracer(*tensors)
        except Exception as error:  # a branch on a value, say; an error of its own comes again
            warn_untraced(_first_line(error))
            return None
    return traced


def warn_untraced(why: str) -> None:
    """Say that a function runs as it is written, and why."""
    reason = f"this function cannot be traced, {why}"
    _warn("make_fx", reason, PIECES["make_fx"].fallback)


@contextmanager
def forgetting_sources() -> Iterator[None]:
    """Torch keeps the source text of every traced function for tracebacks, for ever: not of those
    that are made inside.
    """
    loader = look_up("_loader")
    texts: dict[str, str] = getattr(loader, "eval_cache", {})
    with BUILDING:
        before = set(texts)
        try:
            yield
        finally:
            for name in set(texts) - before:
                del texts[name]
                linecache.cache.pop(name, None)


def merge_repetitions(graph: Graph) -> Graph:
    """Common-subexpression elimination."""
    fx_graph_cse = look_up("fx_graph_cse")
    if fx_graph_cse is None:
        return graph
    with _no_torchscript_warnings():  # it may import the compiler, which has some TorchScript
        merged: Graph = fx_graph_cse(graph)
    return merged


def can_compile() -> bool:
    """Whether `inductor_compile` and the operation that it needs (`stride_order`) are there."""
    found = look_up("standalone_compile"), stride_order()
    return all(piece is not None for piece in found)


def stride_order() -> Callable[..., Any] | None:
    """An operation (tensor, strides) -> tensor: torch's compiler must write it in that order."""
    operation: Callable[..., Any] | None = look_up("force_stride_order")
    return operation


def inductor_compile(traced: GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """Compiled by torch for tensors of exactly these shapes; ask `can_compile` first.

    As it is where torch's compiler fails: without a C compiler, say.
    """
    standalone_compile = look_up("standalone_compile")
    assert standalone_compile is not None
    with _no_torchscript_warnings():
        try:
            compiled: Callable[..., Any] = standalone_compile(
                traced,
                [*tensors],
                dynamic_shapes="from_example_inputs",
                options={"config_patches": known_options(INDUCTOR_OPTIONS)},
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever torch's compiler may raise
            _warn("standalone_compile", f"it failed, {_first_line(error)}", _NOT_COMPILED)
            return traced
    return compiled


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that torch's compiler has; it refuses others."""
    config = importlib.import_module(f"{_INDUCTOR}.config")
    known = {}
    for name, value in options.items():
        try:
            reduce(getattr, name.split("."), config)
        except AttributeError:
            _warn(name, f"no such option in {_INDUCTOR}.config", "steps may compile more slowly")
        else:
            known[name] = value
    return known


def compile_torchscript(source: str, name: str) -> Callable[..., Any] | None:
    """The function of this name in a text of TorchScript; None where it cannot be had.

    It gives the same bits at every call: TorchScript would optimise after the first ones.
    """
    with _no_torchscript_warnings():
        unit, execution = look_up("CompilationUnit"), look_up("optimized_execution")
        if unit is None or execution is None:
            return None
        try:
            function: Callable[..., Any] = getattr(unit(source), name)
        except RuntimeError as error:  # an operation that TorchScript does not know
            _warn("TorchScript", f"it cannot compile a traced step, {error}", _IN_PYTHON)
            return None

    def run(*tensors: Tensor) -> Any:
        with execution(False):
            return function(*tensors)

    return run


@contextmanager
def _no_torchscript_warnings() -> Iterator[None]:
    """That TorchScript is deprecated is known here, and no user can do anything about it.

    For calls of torch alone: a user's own use of TorchScript should be announced.
    """
    with BUILDING, warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", r"(?is).*(torch\.jit|torchscript)", category)
        yield


def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """into[i] <- values[i] in few launches, without waiting for a GPU."""
    foreach = look_up("_foreach_copy_")
    if foreach is not None:
        foreach(into, values, non_blocking=True)
        return
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value, non_blocking=True)


def zero_all(tensors: Sequence[Tensor]) -> None:
    """tensors[i] <- 0 in few launches."""
    foreach = look_up("_foreach_zero_")
    if foreach is not None:
        foreach(tensors)
        return
    for tensor in tensors:
        tensor.zero_()


def import_dynamo() -> None:
    """In this thread: `torch.func` would import it at its first use, in several threads at once."""
    look_up("_dynamo")
