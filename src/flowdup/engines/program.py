"""A step as a program of its own: traced once, and on a GPU compiled, captured and only replayed.

Tracing turns `vmap` and gradients into a flat list of tensor operations.  torch's compiler fuses
them, and finds what it compiled before in its cache; a CUDA graph launches all kernels at once, on
tensors that stay where they are.  On a CPU, TorchScript runs the list (`script.py`).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.jit._fuser import optimized_execution
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from flowdup.engines.script import scripted

State = TypeVar("State")
Step = Callable[..., Any]

_OPTIONS = {
    "shape_padding": False,  # what profits from it is padded already (`subspace.py`)
    "triton.autotune_at_compile_time": False,  # the first run does that
}
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.mv)
_WARM_UP = 2  # runs before the capture, in which libraries choose their kernels


class Eager(Generic[State]):
    """state <- step(fixed, state, *inputs), as it is written."""

    def __init__(self, step: Step, fixed: Any, state: State) -> None:
        self.step, self.fixed, self.state = step, fixed, state

    def __call__(self, *inputs: Any) -> None:
        self.state = self.step(self.fixed, self.state, *inputs)


class Traced:
    """function(*arguments) without the work of transforming it, and without Python where
    TorchScript can say it, for arguments of the same shapes, types and layouts as these.
    """

    def __init__(self, function: Step, *arguments: Any) -> None:
        tensors, spec = tree_flatten(arguments)

        def flat(*tensors: Tensor) -> list[Tensor]:
            out, self.out = tree_flatten(function(*tree_unflatten(tensors, spec)))
            return out

        traced = _trace(flat, [t.clone() for t in tensors])  # one that comes twice is two
        self.constants = _lift_constants(traced)
        self.program = scripted(traced)

    @torch.no_grad()
    @optimized_execution(False)  # which would change the bits after the first calls
    def __call__(self, *arguments: Any) -> Any:
        out = self.program(*tree_flatten(arguments)[0], *self.constants)
        return tree_unflatten(out, self.out)


class Captured(Generic[State]):
    """A step for tensors that never change their shapes, made of examples of all."""

    def __init__(self, step: Step, fixed: Any, state: State, *inputs: Any) -> None:
        self.fixed, self.state, self.inputs = tree_map(_own, (fixed, state, inputs))
        tensors, spec = tree_flatten((self.fixed, self.state, self.inputs))

        def in_place(*tensors: Tensor) -> None:
            fixed, state, inputs = tree_unflatten(tensors, spec)
            (old, before), (new, after) = map(tree_flatten, (state, step(fixed, state, *inputs)))
            assert before == after
            for tensor, value in zip(old, new, strict=True):
                tensor.copy_(value)

        traced = _trace(in_place, tensors)
        self.tensors = tensors + _lift_constants(traced)
        self.graph = _capture(_compile(traced, self.tensors), self.tensors)

    def begin(self, fixed: Any) -> None:
        _copy(self.fixed, fixed)

    def __call__(self, *inputs: Any) -> None:
        _copy(self.inputs, inputs)
        self.graph.replay()


def _own(tensor: Tensor) -> Tensor:
    """A copy, as kernels read it: images and the weights of convolutions have channels last."""
    if tensor.ndim < 4:
        return tensor.clone()
    return tensor.movedim(-3, -1).clone(memory_format=torch.contiguous_format).movedim(-1, -3)


def _trace(function: Step, tensors: list[Tensor]) -> GraphModule:
    from torch._functorch.compile_utils import fx_graph_cse  # noqa: PLC0415  (slow to import)
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

    traced = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    traced.graph = fx_graph_cse(traced.graph)  # backward repeats some of what forward did
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _lift_constants(traced: GraphModule) -> list[Tensor]:
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


def _compile(traced: GraphModule, tensors: list[Tensor]) -> Callable[..., Any]:
    """Compiled by torch; a thread besides has Triton compile our own kernels (`models/kernels`) and
    libraries load theirs.
    """
    from torch._inductor import standalone_compile  # noqa: PLC0415

    with ThreadPoolExecutor(1) as pool:
        kernels = pool.submit(_try, _foreign(traced, tensors))
        program: Callable[..., Any] = standalone_compile(
            traced,
            [*tensors],
            dynamic_shapes="from_example_inputs",
            options={"config_patches": _OPTIONS},
        )
        kernels.result()
    return program


def _foreign(traced: GraphModule, tensors: list[Tensor]) -> list[tuple[Any, Any]]:
    """Our operations and matrix products, one of each sort, with arguments like theirs."""
    graph, found = traced.graph, {}
    inputs = dict(zip(graph.find_nodes(op="placeholder"), tensors, strict=True))
    for node in graph.nodes:
        ours = getattr(node.target, "namespace", "") == "flowdup"
        if ours or getattr(node.target, "overloadpacket", None) in _PRODUCTS:
            given = tree_map_only(Node, lambda n: inputs.get(n, n.meta.get("val")), node.args)
            sort = tree_map_only(Tensor, lambda t: (t.shape, t.stride(), t.dtype), given)
            found[repr((node.target, sort))] = (node.target, given)
    return [*found.values()]


@torch.no_grad()
def _try(calls: list[tuple[Any, Any]]) -> None:
    """Run each once, on whatever memory holds."""
    for operation, like in calls:
        operation(*tree_map_only(Tensor, _something_like, like))


def _something_like(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _capture(program: Callable[..., Any], tensors: list[Tensor]) -> torch.cuda.CUDAGraph:
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    side.wait_stream(here)
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(_WARM_UP):
            program(*tensors)
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        program(*tensors)
    return graph


def _copy(into: Any, values: Any) -> None:
    torch._foreach_copy_(tree_flatten(into)[0], tree_flatten(values)[0], non_blocking=True)
