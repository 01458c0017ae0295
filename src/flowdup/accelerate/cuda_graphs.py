"""CUDA graphs: all launches of a program as one, on tensors that stay where they are."""

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from flowdup import tree
from flowdup.accelerate import torch_private
from flowdup.accelerate.tracing import TracedFunction

_WARM_UP = 2  # runs before the capture, in which libraries choose their kernels


class CudaGraphFunction:
    """traced(x) as one launch of a CUDA graph, for x of the same shape and type as this one.

    Threads take turns, whichever streams they use.
    """

    def __init__(self, traced: TracedFunction, x: Tensor) -> None:
        self.x, self.turn = x.clone(), Lock()
        self.traced = traced  # holds the constants that the graph reads

        def program(x: Tensor) -> None:
            self.out, self.structure = tree.flatten(self.traced(x))

        self.replay = capture(program, [self.x])
        self.stream = torch.cuda.current_stream(x.device) if x.is_cuda else None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Any:
        found = [torch.empty_like(t) for t in self.out]
        with self.turn:
            self._follow_last_caller()
            self.x.copy_(x)
            self.replay()
            torch_private.copy_all(found, self.out)
        return tree.unflatten(found, self.structure)

    def _follow_last_caller(self) -> None:
        """Let this stream wait until the one that was used last has its copy, if it is another."""
        if self.stream is None:
            return
        here = torch.cuda.current_stream(self.x.device)
        if here != self.stream:
            here.wait_stream(self.stream)
            self.stream = here


def capture(program: Callable[..., Any], tensors: list[Tensor]) -> Callable[[], None]:
    """program(*tensors) as a CUDA graph to replay; on a CPU, as a call.

    The program is run first: what it writes to its tensors, it writes now.  Other threads may use
    the GPU meanwhile.
    """
    if not tensors[0].is_cuda:
        _run(program, tensors)
        return lambda: _run(program, tensors)
    with torch_private.BUILDING, torch.cuda.device(tensors[0].device), torch.no_grad():
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                program(*tensors)
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            program(*tensors)
    return graph.replay


@torch.no_grad()
def _run(program: Callable[..., Any], tensors: list[Tensor]) -> None:
    program(*tensors)
