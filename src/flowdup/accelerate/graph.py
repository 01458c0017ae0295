"""Rewrites of a traced step before it is compiled or run; none changes a number."""

from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from flowdup import tree
from flowdup.accelerate import torch_private

_CAT = torch.ops.aten.cat
_CLONE = torch.ops.aten.clone
_SELECT = torch.ops.aten.index_select
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.mv)
_VIEWS = (torch.ops.aten.permute, torch.ops.aten.view, torch.ops.aten.unsqueeze)


def tidy(graph: Graph) -> Graph:
    """Without repetitions (backward does again some of what forward did), views that change
    nothing, and results that nobody reads.
    """
    for node in graph.nodes:
        if _is_view(node) and _layout(node) == _layout(node.args[0]):
            node.replace_all_uses_with(node.args[0])
    graph = torch_private.merge_repetitions(graph)
    graph.eliminate_dead_code()
    return graph


def depends_on_values(traced: GraphModule) -> bool:
    """Whether the host must read a number, or the size of a result, before the next operation: such
    a program cannot be captured in a CUDA graph.
    """
    found = tree.leaves([node.meta.get("val") for node in traced.graph.nodes])
    numbers = (size for v in found for size in (v.shape if isinstance(v, Tensor) else [v]))
    return any(isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool) for n in numbers)


def lift_constants(traced: GraphModule) -> list[Tensor]:
    """Turn tensors that the step holds into arguments after its own, and return them: torch's cache
    keeps compiled programs that hold none.
    """
    graph = traced.graph
    names = dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr"))
    *_, after = graph.find_nodes(op="placeholder")
    for name in names:
        with graph.inserting_after(after):
            after = graph.placeholder(name)
        for node in graph.find_nodes(op="get_attr", target=name):
            node.replace_all_uses_with(after)
            graph.erase_node(node)
    traced.recompile()
    constants = [getattr(traced, name) for name in names]
    for name in names:
        delattr(traced, name)
    return constants


def write_once(traced: GraphModule) -> None:
    """Have torch's compiler write some tensors to memory once, in the order that they have here:

    - what our kernels read: it would write a copy for every reader;
    - parts of a `cat` that others read, too: it writes a part to its place in the whole, and
      (2.11) may let a library's kernel look for it elsewhere;
    - a copy that rows are selected from: it would select them from the original, in its order.
    """
    in_order = torch_private.stride_order()
    assert in_order is not None  # `can_compile` was asked
    graph = traced.graph
    parts = (part for node in graph.nodes if _packet(node) is _CAT for part in node.all_input_nodes)
    wanted = [part for part in parts if len(part.users) > 1]
    wanted += [_viewed(a) for node in graph.nodes if _is_ours(node) for a in node.all_input_nodes]
    sources = (node.args[0] for node in graph.nodes if _packet(node) is _SELECT)
    wanted += [source for source in sources if _packet(source) is _CLONE]
    for node in filter(_is_computed, dict.fromkeys(wanted)):
        with graph.inserting_after(node):
            written = graph.call_function(in_order, (node, node.meta["val"].stride()))
        written.meta = dict(node.meta)
        node.replace_all_uses_with(written)
        written.replace_input_with(written, node)
    traced.recompile()


def kernel_calls(traced: GraphModule, tensors: list[Tensor]) -> list[tuple[Any, Any]]:
    """Calls (operation, arguments) of our kernels and of libraries' matrix products, one for every
    combination of shapes: what is not torch's compiler's to compile.
    """
    graph, found = traced.graph, {}
    inputs = dict(zip(graph.find_nodes(op="placeholder"), tensors, strict=True))
    for node in graph.nodes:
        if _is_ours(node) or _packet(node) in _PRODUCTS:
            given = tree.map(lambda a: _example(a, inputs), node.args)
            found[repr((node.target, tree.map(_description, given)))] = (node.target, given)
    return [*found.values()]


def _example(argument: Any, inputs: dict[Node, Tensor]) -> Any:
    """The tensor that a node of the graph stands for; anything else as it is."""
    if not isinstance(argument, Node):
        return argument
    return inputs.get(argument, argument.meta.get("val"))


def _description(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _is_ours(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "flowdup"  # `kernels/`


def _is_computed(node: Node) -> bool:
    """Whether torch's compiler decides how it lies in memory: not arguments, not what our kernels
    write.
    """
    of = node.args[0] if node.target is getitem else node
    return node.op == "call_function" and isinstance(of, Node) and not _is_ours(of)


def _is_view(node: Node) -> bool:
    return _packet(node) in _VIEWS


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _viewed(node: Any) -> Node:
    """What this is a view of, itself if it is none."""
    return _viewed(node.args[0]) if _is_view(node) else node


def _layout(node: Any) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype
