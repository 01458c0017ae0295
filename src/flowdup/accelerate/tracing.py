"""Tracing: a function of tensors as a flat list of operations, run without the work of `vmap` and
gradients and, through TorchScript, without Python.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from flowdup import tree
from flowdup.accelerate import torch_private
from flowdup.accelerate.graph import depends_on_values, lift_constants, tidy
from flowdup.accelerate.torchscript import to_torchscript

Function = Callable[..., Any]


def trace(function: Function, tensors: list[Tensor]) -> GraphModule | None:
    """What function(*tensors) does, tidied; None where torch cannot trace.

    Python decides once, now: a branch on a tensor's value is not followed again.
    """
    traced = torch_private.trace(function, tensors)
    if traced is None:
        return None
    if any(t.is_cuda for t in tensors) and depends_on_values(traced):
        torch_private.warn_untraced("the size of a tensor depends on values, so it is not captured")
        return None
    traced.graph = tidy(traced.graph)
    traced.recompile()
    return traced


class TracedFunction:
    """function(*arguments) as a traced program, for trees of tensors like these.

    Arguments must have the shapes, types and memory layouts of the examples.  Tensors that the
    function knows besides are read at every call.
    """

    def __init__(self, function: Function, *arguments: Any) -> None:
        tensors, structure = tree.flatten(arguments)

        def flat(*tensors: Tensor) -> list[Tensor]:
            out, self.out = tree.flatten(function(*tree.unflatten(tensors, structure)))
            return out

        self.constants: list[Tensor] = []
        self.program: Function = flat
        with torch_private.forgetting_sources():
            traced = trace(flat, [t.clone() for t in tensors])  # a tensor that comes twice is two
            self.is_traced = traced is not None
            if traced is not None:
                self.constants = lift_constants(traced)
                self.program = to_torchscript(traced)

    @torch.no_grad()
    def __call__(self, *arguments: Any) -> Any:
        out = self.program(*tree.leaves(arguments), *self.constants)
        return tree.unflatten(out, self.out)
