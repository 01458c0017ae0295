"""What is done to a traced step before it runs: nothing that changes a number."""

from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from flowdup import tree

_CAT = torch.ops.aten.cat
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.mv)
_VIEWS = (torch.ops.aten.permute, torch.ops.aten.view, torch.ops.aten.unsqueeze)


def tidy(graph: Graph) -> Graph:
    """Without repetitions (backward does again some of what forward did), views that change
    nothing, and what nobody reads.
    """
    from torch._functorch.compile_utils import fx_graph_cse  # noqa: PLC0415  (slow to import)

    for node in graph.nodes:
        if _is_view(node) and _form(node) == _form(node.args[0]):
            node.replace_all_uses_with(node.args[0])
    graph = fx_graph_cse(graph)
    graph.eliminate_dead_code()
    return graph


def lift_constants(traced: GraphModule) -> list[Tensor]:
    """Tensors that the step knows besides its arguments become arguments, too: a compiled program
    is found in the cache only if it holds none.
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
    """Tell torch's compiler to write some tensors once, in the order of memory that they have here:

    - what our kernels read: it would write a copy for every reader;
    - parts of a `cat` that others read, too: it writes a part to its place in the whole, and
      (2.11) may let a library's kernel look for it elsewhere.
    """
    from torch._inductor.inductor_prims import force_stride_order  # noqa: PLC0415

    graph = traced.graph
    parts = (part for node in graph.nodes if _packet(node) is _CAT for part in node.all_input_nodes)
    wanted = [part for part in parts if len(part.users) > 1]
    wanted += [_shown(a) for node in graph.nodes if _is_ours(node) for a in node.all_input_nodes]
    for node in filter(_is_computed, dict.fromkeys(wanted)):
        with graph.inserting_after(node):
            order = node.meta["val"].stride()
            written = graph.call_function(force_stride_order, (node, order))
        written.meta = dict(node.meta)
        node.replace_all_uses_with(written)
        written.replace_input_with(written, node)
    traced.recompile()


def foreign(traced: GraphModule, tensors: list[Tensor]) -> list[tuple[Any, Any]]:
    """Our operations and matrix products, one of each sort, with arguments like theirs."""
    graph, found = traced.graph, {}
    inputs = dict(zip(graph.find_nodes(op="placeholder"), tensors, strict=True))
    for node in graph.nodes:
        if _is_ours(node) or _packet(node) in _PRODUCTS:
            given = tree.map(lambda a: _example(a, inputs), node.args)
            sort = tree.map(_description, given)
            found[repr((node.target, sort))] = (node.target, given)
    return [*found.values()]


def _example(argument: Any, inputs: dict[Node, Tensor]) -> Any:
    """The tensor that a node of the graph stands for; anything else as it is."""
    if not isinstance(argument, Node):
        return argument
    return inputs.get(argument, argument.meta.get("val"))


def _description(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _is_ours(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "flowdup"  # `models/kernels`


def _is_computed(node: Node) -> bool:
    """By torch's compiler, if it likes: arguments and what our kernels write lie in memory."""
    of = node.args[0] if node.target is getitem else node
    return node.op == "call_function" and isinstance(of, Node) and not _is_ours(of)


def _is_view(node: Node) -> bool:
    return _packet(node) in _VIEWS


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _shown(node: Any) -> Node:
    """What this is a view of."""
    return _shown(node.args[0]) if _is_view(node) else node


def _form(node: Any) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype
