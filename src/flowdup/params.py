"""What is trained and sent: tensors by name."""

from torch import Tensor

Params = dict[str, Tensor]


def prefixed(prefix: str, params: Params) -> Params:
    return {f"{prefix}{name}": p for name, p in params.items()}


def part(params: Params, prefix: str) -> Params:
    """Those whose names start with the prefix, without it."""
    return {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}
