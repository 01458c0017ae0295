"""A traced program as TorchScript, which runs without Python: threads do not wait for its lock."""

import math
from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from flowdup import tree

_NAME, _EMPTY = "program", "no_sizes"
_KINDS = (torch.dtype, torch.layout, torch.memory_format)
_WORDS = (Node, bool, int, float, str, type(None), torch.device, *_KINDS)


def scripted(traced: GraphModule) -> Callable[..., Any]:
    """The same function, which must hold no tensors; as it is, where TorchScript has no words."""
    if not all(map(_sayable, traced.graph.nodes)):
        return traced
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


def _sayable(node: Node) -> bool:
    call = node.op == "call_function" and node.target is not getitem
    words = all(isinstance(v, _WORDS) for v in tree.leaves((node.args, node.kwargs)))
    return words and (not call or isinstance(node.target, OpOverload))


def _call(node: Node) -> str:
    target: Any = node.target
    if target is getitem:
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
    if isinstance(value, _KINDS):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
