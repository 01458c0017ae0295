"""A traced program as TorchScript, which runs without Python: threads do not wait for its lock."""

import math
from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from flowdup import tree
from flowdup.accelerate import torch_private

_NAME, _EMPTY = "program", "no_sizes"
_ENUMS = (torch.dtype, torch.layout, torch.memory_format)
_LITERALS = (Node, bool, int, float, str, type(None), torch.device, *_ENUMS)


def to_torchscript(traced: GraphModule) -> Callable[..., Any]:
    """The same function, which must hold no tensors; as it is, where TorchScript cannot express it
    or torch no longer has TorchScript.
    """
    if not all(map(_is_expressible, traced.graph.nodes)):
        return traced
    return torch_private.compile_torchscript(_source(traced), _NAME) or traced


def _source(traced: GraphModule) -> str:
    inputs, lines = [], [f"{_EMPTY}: List[int] = []"]
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            inputs.append(f"{node.name}: Tensor")
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
        else:
            lines.append(f"{node.name} = {_call(node)}")
    body = "".join(f"    {line}\n" for line in lines)
    return f"def {_NAME}({', '.join(inputs)}):\n{body}"


def _is_expressible(node: Node) -> bool:
    """Whether it is one of torch's operations with arguments that have literals."""
    call = node.op == "call_function" and node.target is not getitem
    if call and not hasattr(node.target, "overloadpacket"):
        return False
    return all(isinstance(v, _LITERALS) for v in tree.leaves((node.args, node.kwargs)))


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
    if isinstance(value, _ENUMS):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
