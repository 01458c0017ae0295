"""A function of one tensor, made fast for many calls: one door for a CPU and a GPU."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flowdup.accelerate import torch_private
from flowdup.accelerate.cuda_graphs import CudaGraphFunction
from flowdup.accelerate.tracing import TracedFunction


def fast_function(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """function(x) traced once, for x of this shape, type and layout: TorchScript on a CPU, a CUDA
    graph on a GPU.  Any thread may make it and call it.

    What cannot be traced is not captured either: it may copy from the host as it is written.
    """
    if x.is_cuda and torch_private.can_trace():
        return CudaGraphFunction(function, x)
    return TracedFunction(function, x)
