"""A training step as a program of its own: traced, compiled by torch and captured in a CUDA graph,
or run as it is written.
"""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from flowdup import tree
from flowdup.accelerate import torch_private
from flowdup.accelerate.cuda_graphs import capture
from flowdup.accelerate.graph import kernel_calls, lift_constants, write_once
from flowdup.accelerate.tracing import trace

State = TypeVar("State")
Step = Callable[..., Any]

_THREADS = 4  # more would take the interpreter from torch's compiler


class EagerStep(Generic[State]):
    """state <- step(fixed, state, *inputs), run as it is written."""

    def __init__(self, step: Step, fixed: Any, state: State) -> None:
        self.step, self.fixed, self.state = step, fixed, state

    def __call__(self, *inputs: Any) -> None:
        self.state = self.step(self.fixed, self.state, *inputs)


class CompiledStep(Generic[State]):
    """state <- step(fixed, state, *inputs), compiled and captured for tensors like these examples.

    It has tensors of its own, which never change their shapes or places: every call writes over
    `state`.  Making it takes some steps, so `state` must be set before the first call.  `begin`
    replaces what is fixed.
    """

    def __init__(self, step: Step, fixed: Any, state: State, *inputs: Any) -> None:
        self.fixed, self.state, self.inputs = tree.map(_own_copy, (fixed, state, inputs))
        self.tensors, structure = tree.flatten((self.fixed, self.state, self.inputs))

        def in_place(*tensors: Tensor) -> None:
            fixed, state, inputs = tree.unflatten(tensors, structure)
            old, before = tree.flatten(state)
            new, after = tree.flatten(step(fixed, state, *inputs))
            assert before == after
            for tensor, value in zip(old, new, strict=True):
                tensor.copy_(value)

        with _no_collection():
            traced = trace(in_place, self.tensors)
            if traced is None:
                self.run: Callable[[], None] = torch.no_grad()(lambda: in_place(*self.tensors))
                return
            self.tensors += lift_constants(traced)
            program = _compile(traced, self.tensors)
        self.run = capture(program, self.tensors)

    def begin(self, fixed: Any) -> None:
        """Put what stays the same for a task where the program reads it."""
        _copy(self.fixed, fixed)

    def __call__(self, *inputs: Any) -> None:
        _copy(self.inputs, inputs)
        self.run()


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


def _own_copy(tensor: Tensor) -> Tensor:
    """In the layout that kernels read: images and weights of convolutions have channels last."""
    if tensor.ndim < 4:
        return tensor.clone()
    return tensor.movedim(-3, -1).clone(memory_format=torch.contiguous_format).movedim(-1, -3)


def _compile(traced: GraphModule, tensors: list[Tensor]) -> Callable[..., Any]:
    """Compiled by torch, while threads have Triton compile our own kernels (`kernels/`) and have
    libraries load theirs; as it is, where torch cannot compile it.
    """
    if not torch_private.can_compile():
        return traced
    write_once(traced)
    with ThreadPoolExecutor(_THREADS) as pool:
        calls = [pool.submit(_warm_up, *call) for call in kernel_calls(traced, tensors)]
        program = torch_private.inductor_compile(traced, tensors)
        for call in calls:
            call.result()
    return program


@torch.no_grad()
def _warm_up(operation: Callable[..., Any], arguments: Any) -> None:
    """Run it once, on tensors like these that hold anything."""
    operation(*tree.map(_uninitialized, arguments))


def _uninitialized(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _copy(into: Any, values: Any) -> None:
    torch_private.copy_all(tree.leaves(into), tree.leaves(values))
