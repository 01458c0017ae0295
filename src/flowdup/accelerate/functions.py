"""A function of one tensor, made fast for many calls: one door for a CPU and a GPU."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flowdup.accelerate.cuda_graphs import CudaGraphFunction
from flowdup.accelerate.tracing import TracedFunction


def fast_function(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """function(x) traced once, for x of this shape, type and layout: TorchScript on a CPU, a CUDA
    graph on a GPU.  Any thread may make it and call it.

    What cannot be traced is not captured either: it may copy from the host as it is written, or
    wait for the GPU to take a branch.
    """
    traced = TracedFunction(function, x)
    return CudaGraphFunction(traced, x) if x.is_cuda and traced.is_traced else traced
