"""Steps traced and run without Python give what they give as they are written."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from flowdup import tree
from flowdup.accelerate.graph import depends_on_values
from flowdup.accelerate.tracing import TracedFunction, trace


def both(function, *arguments: object) -> None:  # type: ignore[no-untyped-def]
    program, wanted = TracedFunction(function, *arguments), function(*arguments)
    for _ in range(5):  # TorchScript would optimise after the first calls
        found = program(*arguments)
        assert type(found) is type(wanted)
        for own, other in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
            assert own.dtype == other.dtype
            assert torch.equal(own, other)


def test_gradients_inside_vmap_and_dictionaries_in_and_out() -> None:
    def step(state: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            return torch.nn.functional.layer_norm((x @ w).relu(), (4,)).square().mean()

        found = vmap(grad(loss))(state["w"], x)
        return {"w": state["w"] - 0.1 * found, "total": found.sum(0)}

    torch.manual_seed(0)
    both(step, {"w": torch.randn(3, 5, 4)}, torch.randn(3, 6, 5))


def test_arguments_of_every_kind() -> None:
    held = torch.arange(3.0)

    def step(x: Tensor) -> list[Tensor]:
        first, rest = torch.split(x.flatten(), [2, x.numel() - 2])
        values, places = x.max(1)
        return [
            x.new_zeros(()),
            x.new_full((), float("inf")).clamp(max=1e-7),
            x.to(torch.float64, memory_format=torch.contiguous_format),
            torch.nn.functional.conv2d(x[None, None], x[None, None, :2, :2], padding=1),
            x.sum((0, 1), keepdim=True) + held[:, None],
            torch.where(x > 0, x, -1.0),
            first / rest.norm(),
            values,
            places,
        ]

    torch.manual_seed(0)
    both(step, torch.randn(4, 3))


def test_constants_are_read_when_it_runs() -> None:
    """A pool may be refilled between two steps."""
    held = torch.ones(2)
    program = TracedFunction(lambda x: x + held, torch.zeros(2))
    held += 1
    assert program(torch.zeros(2)).tolist() == [2, 2]


def test_every_call_gives_the_same_bits() -> None:
    """Sums of several products are what an optimiser would like to join."""

    def step(w: Tensor, x: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            state = torch.zeros(4, 16)
            for part in x:
                state = torch.tanh(part @ w + state @ w)
            return state.square().sum()

        return grad(loss)(w)

    torch.manual_seed(0)
    both(step, torch.randn(16, 16) / 4, torch.randn(6, 4, 16))


def test_what_torchscript_cannot_express_runs_in_python() -> None:
    both(lambda x: torch.view_as_real(x * 1j), torch.randn(3, dtype=torch.complex64))


def test_what_cannot_be_traced_runs_as_it_is_written_and_says_so() -> None:
    def step(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    with pytest.warns(RuntimeWarning, match="this function cannot be traced"):
        program = TracedFunction(step, torch.ones(2))
    assert program(torch.ones(2)).tolist() == [2, 2]
    assert program(-torch.ones(2)).tolist() == [-2, -2]


def test_a_size_that_depends_on_values_is_seen_and_a_gather_is_not_one() -> None:
    """A CUDA graph can hold the second only."""
    x, rows = torch.randn(4), torch.tensor([0, 2])
    for step, waits in ((lambda x, rows: x[x > 0].sum(), True), (lambda x, rows: x[rows], False)):
        traced = trace(step, [x, rows])
        assert traced is not None
        assert depends_on_values(traced) is waits
