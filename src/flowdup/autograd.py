"""Calls of a `torch.autograd.Function` with a type that checkers know."""

from typing import Any

import torch
from torch import Tensor


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """`function.apply(*arguments)`, for a function that returns one tensor."""
    out: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return out
