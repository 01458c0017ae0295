"""A traced program as TorchScript, which runs without Python: threads do not wait for its lock."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

_NAME, _EMPTY = "program", "no_sizes"


def scripted(traced: GraphModule) -> Callable[..., Any]:
    """The same function; it must hold no tensors and call nothing but torch's operations."""
    inputs, lines = [], [f"{_EMPTY}: List[int] = []"]
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            inputs.append(f"{node.name}: Tensor")
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
        else:
            lines.append(f"{node.name} = {_call(node)}")
    body = "".join(f"    {line}\n" for line in lines)
    unit = torch.jit.CompilationUnit(f"def {_NAME}({', '.join(inputs)}):\n{body}")
    program: Callable[..., Any] = getattr(unit, _NAME)
    return program


def _call(node: Node) -> str:
    target: Any = node.target
    if target.__name__ == "getitem":
        return f"{_text(node.args[0])}[{node.args[1]}]"
    named = [f"{name}={_text(value)}" for name, value in node.kwargs.items()]
    return f"torch.ops.{target.overloadpacket}({', '.join([*map(_text, node.args), *named])})"


def _text(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]" if value else _EMPTY
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    assert value is None or isinstance(value, bool | int | float | str), value
    return repr(value)
