import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import SPEC, client
from torch import Tensor

from flowdup.hypernetwork import Hypernetwork, HypernetworkConfig
from flowdup.models import build_network
from flowdup.random import Stream


def build(**settings: int | float | bool) -> tuple[Hypernetwork, dict[str, Tensor]]:
    config = HypernetworkConfig(embedding=12, hidden=10, **settings)  # type: ignore[arg-type]
    h1 = build_network("mlp", SPEC.shape, 12, SPEC.reader().to(torch.float64))
    h = Hypernetwork(config, h1, 30)
    return h, {n: p.double() for n, p in h.init(Stream(1)).items()}


def ones(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.float64)


@given(st.integers(1, 40), st.integers(0, 1000))
def test_the_order_of_a_set_does_not_matter(points: int, seed: int) -> None:
    h, params = build()
    x = client(0, points).x
    shuffled = x[torch.from_numpy(Stream(seed).permutation(points))]
    a, b = h(params, x, ones(points)), h(params, shuffled, ones(points))
    assert torch.allclose(a, b, atol=1e-12)


@given(st.integers(1, 60), st.integers(1, 70))
def test_a_set_of_any_size_streams_to_the_same_result(points: int, chunk: int) -> None:
    whole, params = build()
    streamed, _ = build(chunk=chunk)
    x = client(1, points).x
    a, b = (h(params, x, ones(points)) for h in (whole, streamed))
    assert torch.allclose(a, b, atol=1e-12)


@given(st.integers(1, 20), st.integers(1, 20))
def test_padding_does_not_count(points: int, padding: int) -> None:
    h, params = build()
    x = client(2, points + padding).x
    present = torch.cat([ones(points), 0 * ones(padding)])
    padded, plain = h(params, x, present), h(params, x[:points], ones(points))
    assert torch.allclose(padded, plain, atol=1e-12)


@given(st.integers(1, 20), st.integers(2, 4))
def test_a_set_repeated_has_the_same_embedding(points: int, times: int) -> None:
    h, params = build()
    x = client(3, points).x
    repeated = x.repeat(times, 1, 1, 1)
    a = h.embedding(params, x, ones(points))
    b = h.embedding(params, repeated, ones(points * times))
    assert torch.allclose(a, b, atol=1e-12)


def test_the_embedding_is_the_mean_of_h1() -> None:
    h, params = build()
    x = client(0, 9).x
    weights = {n.removeprefix("h1."): p for n, p in params.items() if n.startswith("h1.")}
    expected = np.mean([h.h1(weights, row[None]).numpy()[0] for row in x], axis=0)
    np.testing.assert_allclose(h.embedding(params, x, ones(9)).numpy(), expected, atol=1e-12)


def test_v_starts_near_zero() -> None:
    h, params = build()
    assert h(params, client(0, 20).x, ones(20)).norm() < 0.3
    loud, params = build(output_scale=1.0)
    assert loud(params, client(0, 20).x, ones(20)).norm() > 3


def test_a_set_on_disk_is_read_in_pieces(tmp_path: Path) -> None:
    """128 MB of a file pass through h1; their floats would take 1 GB, and half of it must do."""
    path = tmp_path / "x.npy"
    np.lib.format.open_memmap(path, "w+", np.uint8, (2**21, 1, 8, 8)).flush()
    code = f"""
import resource, sys
import numpy as np, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_hypernetwork import build, ones
x = torch.from_numpy(np.load({str(path)!r}, mmap_mode="c"))
h, params = build(chunk=2**15)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
r = h.embedding(params, x, ones(len(x)))
assert torch.isfinite(r).all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 5e8
