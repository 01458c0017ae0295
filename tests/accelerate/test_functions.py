"""Functions made fast: any thread may make them, any thread may call them."""

import linecache
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small import STREAM, client, method
from torch import Tensor, nn

from flowdup.accelerate import torch_private
from flowdup.accelerate.cuda_graphs import CudaGraphFunction
from flowdup.accelerate.functions import fast_function
from flowdup.accelerate.tracing import TracedFunction
from flowdup.models import Weights

THREADS = 8


@pytest.mark.parametrize("name", ["flowdup", "fedavg-tent"])
def test_eight_threads_make_and_call_personalizers_at_once(name: str) -> None:
    """Each for sets of its own size; tracing replaces methods of `nn.Module` meanwhile."""
    m = method(name)
    psi, start = m.init(STREAM), threading.Barrier(THREADS)
    before = nn.Module.__call__, nn.Module.__getattr__

    def personalize(x: Tensor) -> Weights:
        return m.personalize(psi, x, torch.ones(len(x)))

    def make_and_call(number: int) -> list[Weights]:
        start.wait()
        make = fast_function(personalize, client(number, number + 3).x)
        return [make(client(other, number + 3).x) for other in (number, number + 1)]

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(make_and_call, range(THREADS)))
    for number, own in enumerate(found):
        for other, weights in zip((number, number + 1), own, strict=True):
            wanted = personalize(client(other, number + 3).x)
            assert all(torch.allclose(weights[n], w, atol=1e-5) for n, w in wanted.items())
    assert (nn.Module.__call__, nn.Module.__getattr__) == before


def test_functions_that_are_gone_leave_no_text_behind() -> None:
    """Torch keeps the source of what it traced, in two places."""

    def texts() -> int:
        kept = sum("eval_with_key" in name for name in linecache.cache)
        loader = torch_private.look_up("_loader")
        assert loader is not None
        return kept + len(loader.eval_cache)

    before = texts()
    fast_function(lambda x: (x + 1).sin(), torch.ones(3))
    assert texts() == before


def test_results_of_a_captured_function_are_copies() -> None:
    """A replay writes over what the last one wrote.  On a CPU it is a call instead."""
    traced = TracedFunction(lambda x: {"y": [2 * x, x.sum()]}, torch.ones(3))
    double = CudaGraphFunction(traced, torch.ones(3))
    first = double(torch.ones(3))
    second = double(torch.full((3,), 2.0))
    assert [t.tolist() for t in first["y"]] == [[2, 2, 2], 3]
    assert [t.tolist() for t in second["y"]] == [[4, 4, 4], 6]
