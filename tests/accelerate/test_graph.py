"""What is done to a traced step changes none of its numbers."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from flowdup.accelerate.graph import lift_constants, tidy, write_once


@torch.library.custom_op("flowdup::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def traced(function: Callable[..., Tensor], *tensors: Tensor) -> GraphModule:
    program = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    program.graph = tidy(program.graph)
    program.recompile()
    return program


def operations(program: GraphModule) -> Counter[str]:
    return Counter(str(n.target) for n in program.graph.nodes if n.op == "call_function")


def in_order(program: GraphModule) -> list[Node]:
    """Those that are written in a given order."""
    target = torch.ops.prims.inductor_force_stride_order.default
    return list(program.graph.find_nodes(op="call_function", target=target))


def test_views_that_change_nothing_and_repetitions_vanish() -> None:
    def step(x: Tensor) -> Tensor:
        return x.permute(0, 1).view(2, 3).sin() + x.sin() * x.permute(1, 0).cos().sum()

    x = torch.randn(2, 3)
    program = traced(step, x)
    assert torch.equal(program(x), step(x))
    assert operations(program)["aten.sin.default"] == 1
    assert operations(program)["aten.permute.default"] == 1
    assert operations(program)["aten.view.default"] == 0


def test_a_view_as_another_type_stays() -> None:
    def step(x: Tensor) -> Tensor:
        return x.view(torch.int32) + 1

    x = torch.randn(3)
    assert torch.equal(traced(step, x)(x), step(x))


def test_what_our_kernels_read_is_written_once_and_in_its_order() -> None:
    def step(x: Tensor) -> Tensor:
        image = x.permute(0, 3, 1, 2).relu()  # channels last in memory
        first, again = (doubled(image.permute(0, 2, 3, 1)) for _ in range(2))
        return doubled(first) + again * image.permute(0, 2, 3, 1)

    x = torch.randn(2, 4, 4, 3)
    program = traced(step, x)
    write_once(program)
    assert torch.equal(program(x), step(x))
    assert [node.args[1] for node in in_order(program)] == [(48, 1, 12, 3)]


def test_a_part_of_a_whole_that_others_read_is_written_apart() -> None:
    def step(x: Tensor) -> Tensor:
        shared, own = x.sin(), x.cos()
        return torch.cat([shared, own], 1) @ torch.cat([shared, own], 1).T + shared @ x.T

    x = torch.randn(2, 3)
    program = traced(step, x)
    write_once(program)
    assert torch.equal(program(x), step(x))
    assert len(in_order(program)) == 1


def test_constants_become_arguments() -> None:
    held = torch.arange(3.0)
    program = traced(lambda x: x * held + held, torch.ones(3))
    (constant,) = lift_constants(program)
    assert program(torch.ones(3), constant).tolist() == [0, 2, 4]
    assert program(torch.ones(3), torch.zeros(3)).tolist() == [0, 0, 0]


def test_rows_are_selected_from_a_copy_that_is_written() -> None:
    rows = torch.tensor([2, 0, 2])

    def step(x: Tensor) -> Tensor:
        return x.sin().T.contiguous().index_select(0, rows)

    x = torch.randn(4, 3)
    program = traced(step, x)
    write_once(program)
    assert torch.equal(program(x), step(x))
    (written,) = in_order(program)
    assert written.args[1] == (4, 1)
    assert [str(user.target) for user in written.users] == ["aten.index_select.default"]
