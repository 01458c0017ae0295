"""A step as a program of its own: traced once, and on a GPU compiled, captured and only replayed.

Tracing turns `vmap` and gradients into a flat list of tensor operations.  torch's compiler fuses
them, and finds what it compiled before in its cache; a CUDA graph launches all kernels at once, on
tensors that stay where they are.  On a CPU, TorchScript runs the list (`script.py`); what is too
small to be compiled runs so on a GPU, in a CUDA graph, too.
"""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.jit._fuser import optimized_execution

from flowdup import tree
from flowdup.engines.graph import foreign, lift_constants, tidy, write_once
from flowdup.engines.script import scripted

State = TypeVar("State")
Step = Callable[..., Any]

_OPTIONS = {
    "shape_padding": False,  # what profits from it is padded already (`subspace.py`)
    "comprehensive_padding": False,  # likewise; with gaps in P v, indices took 10 s to simplify
    "triton.autotune_at_compile_time": False,  # the first run does that
    "triton.autotune_pointwise": False,  # 2 % faster steps are not worth 10 s of ResNet18's first
    "max_fusion_buffer_group_pairwise_attempts": 4,  # 64 take longer and find hardly more
}
_THREADS = 4  # more would take the interpreter from torch's compiler
_WARM_UP = 2  # runs before the capture, in which libraries choose their kernels


class Eager(Generic[State]):
    """state <- step(fixed, state, *inputs), as it is written."""

    def __init__(self, step: Step, fixed: Any, state: State) -> None:
        self.step, self.fixed, self.state = step, fixed, state

    def __call__(self, *inputs: Any) -> None:
        self.state = self.step(self.fixed, self.state, *inputs)


class Traced:
    """function(*arguments) without the work of transforming it, and without Python where
    TorchScript can say it, for arguments of the same shapes, types and layouts as these.
    """

    def __init__(self, function: Step, *arguments: Any) -> None:
        tensors, spec = tree.flatten(arguments)

        def flat(*tensors: Tensor) -> list[Tensor]:
            out, self.out = tree.flatten(function(*tree.unflatten(tensors, spec)))
            return out

        traced = _trace(flat, [t.clone() for t in tensors])  # one that comes twice is two
        self.constants = lift_constants(traced)
        self.program = scripted(traced)

    @torch.no_grad()
    @optimized_execution(False)  # which would change the bits after the first calls
    def __call__(self, *arguments: Any) -> Any:
        out = self.program(*tree.flatten(arguments)[0], *self.constants)
        return tree.unflatten(out, self.out)


class Replayed:
    """function(x) with one launch of all that it does on a GPU, for x of the same shape and type.

    Threads take turns, on one stream.
    """

    def __init__(self, function: Step, x: Tensor) -> None:
        self.x, self.turn = x.clone(), Lock()
        self.traced = Traced(function, x)  # holds the constants that the graph reads

        def program(x: Tensor) -> None:
            self.out, self.spec = tree.flatten(self.traced(x))

        self.graph = _capture(program, [self.x])

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Any:
        found = [torch.empty_like(t) for t in self.out]
        with self.turn:
            self.x.copy_(x)
            self.graph.replay()
            torch._foreach_copy_(found, self.out)
        return tree.unflatten(found, self.spec)


def prepared(function: Step, x: Tensor) -> Step:
    """function(x) without Python's work between operations, for x like this one."""
    return Replayed(function, x) if x.is_cuda else Traced(function, x)


class Captured(Generic[State]):
    """A step for tensors that never change their shapes, made of examples of all."""

    def __init__(self, step: Step, fixed: Any, state: State, *inputs: Any) -> None:
        self.fixed, self.state, self.inputs = tree.map(_own, (fixed, state, inputs))
        tensors, spec = tree.flatten((self.fixed, self.state, self.inputs))

        def in_place(*tensors: Tensor) -> None:
            fixed, state, inputs = tree.unflatten(tensors, spec)
            (old, before), (new, after) = map(tree.flatten, (state, step(fixed, state, *inputs)))
            assert before == after
            for tensor, value in zip(old, new, strict=True):
                tensor.copy_(value)

        with _no_collection():
            traced = _trace(in_place, tensors)
            self.tensors = tensors + lift_constants(traced)
            program = _compile(traced, self.tensors)
        self.graph = _capture(program, self.tensors)

    def begin(self, fixed: Any) -> None:
        _copy(self.fixed, fixed)

    def __call__(self, *inputs: Any) -> None:
        _copy(self.inputs, inputs)
        self.graph.replay()


@contextmanager
def _no_collection() -> Iterator[None]:
    """torch's compiler makes many objects and little garbage: looking for it is 7 % of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _own(tensor: Tensor) -> Tensor:
    """A copy, as kernels read it: images and the weights of convolutions have channels last."""
    if tensor.ndim < 4:
        return tensor.clone()
    return tensor.movedim(-3, -1).clone(memory_format=torch.contiguous_format).movedim(-1, -3)


def _trace(function: Step, tensors: list[Tensor]) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415  (slow to import)

    traced = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    traced.graph = tidy(traced.graph)
    traced.recompile()
    return traced


def _compile(traced: GraphModule, tensors: list[Tensor]) -> Callable[..., Any]:
    """Compiled by torch; threads besides have Triton compile our own kernels (`models/kernels`) and
    libraries load theirs.
    """
    from torch._inductor import standalone_compile  # noqa: PLC0415

    write_once(traced)
    with ThreadPoolExecutor(_THREADS) as pool:
        tried = [pool.submit(_try, *call) for call in foreign(traced, tensors)]
        program: Callable[..., Any] = standalone_compile(
            traced,
            [*tensors],
            dynamic_shapes="from_example_inputs",
            options={"config_patches": _OPTIONS},
        )
        for call in tried:
            call.result()
    return program


@torch.no_grad()
def _try(operation: Callable[..., Any], like: Any) -> None:
    """Run it once, on whatever memory holds."""
    operation(*tree.map(_something_like, like))


def _something_like(fake: Any) -> Any:
    if not isinstance(fake, Tensor):
        return fake
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _capture(program: Callable[..., Any], tensors: list[Tensor]) -> torch.cuda.CUDAGraph:
    with torch.cuda.device(tensors[0].device), torch.no_grad():
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                program(*tensors)
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            program(*tensors)
    return graph


def _copy(into: Any, values: Any) -> None:
    torch._foreach_copy_(tree.flatten(into)[0], tree.flatten(values)[0], non_blocking=True)
