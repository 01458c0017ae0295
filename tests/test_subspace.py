import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flowdup.errors import ConfigError
from flowdup.models import Network, build_network
from flowdup.random import Stream
from flowdup.subspace import Hashed, Subspace, SubspaceConfig

STREAM = Stream(9)


def network(inputs: int = 3, hidden: int = 5, outputs: int = 2) -> Network:
    def factory(shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    return Network.build(factory, (inputs,), outputs, lambda x: x)


def build(net: Network, kind: str, k: int, row_scale: str = "layer") -> Subspace:
    return Subspace(SubspaceConfig(kind, k, row_scale), net, STREAM, dtype=torch.float64)


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([w.reshape(-1) for w in weights.values()])


def matrix(subspace: Subspace) -> Tensor:
    """P, column by column."""
    origin = subspace.theta_0
    return torch.stack([flat(subspace(v)) - origin for v in torch.eye(subspace.k).double()], 1)


def row_scale(net: Network) -> np.ndarray:
    """s_l = sigma_l / rms(sigma), sigma_l = sqrt(2 / fan_in)."""
    sigma = np.concatenate(
        [np.full(math.prod(s), net.deviations[n]) for n, s in net.shapes.items()]
    )
    return sigma / np.sqrt((sigma**2).mean())


def test_kronecker_is_the_kronecker_product_of_its_sign_factors() -> None:
    net = network(hidden=6)
    d, k = net.size, 5
    assert d == 38
    (a, b), (m, n) = (5, 8), (2, 3)
    stream = STREAM.child("expansion")
    left = stream.child("left").signs(a * m).reshape(a, m)
    right = stream.child("right").signs(b * n).reshape(b, n)
    dense = np.kron(left, right)[:d, :k] / math.sqrt(d) * row_scale(net)[:, None]
    np.testing.assert_allclose(matrix(build(net, "kronecker", k)).numpy(), dense, atol=1e-12)


def test_dense_is_its_signs() -> None:
    net = network()
    signs = STREAM.child("expansion").signs(net.size * 5).reshape(-1, 5)
    found = matrix(build(net, "dense", 5, "none")).numpy()
    np.testing.assert_allclose(found, signs / math.sqrt(net.size), atol=1e-7)


def test_hashed_puts_every_weight_in_one_coordinate() -> None:
    net = network()
    found = matrix(build(net, "hashed", 6)).numpy()
    assert ((found != 0).sum(1) == 1).all()
    supports = (found != 0).sum(0)
    assert supports.max() - supports.min() <= 1
    inside = np.abs(found).max(1) / row_scale(net)
    for column in found.T:  # within a support, entries differ by the row scale alone
        assert np.ptp(inside[column != 0]) < 1e-6


@pytest.mark.parametrize("k", [1, 5, 32])  # of 32 weights a coordinate has all, six or seven, one
def test_gradients_of_a_hashed_expansion_are_those_of_its_matrix(k: int) -> None:
    net = network()
    subspace = build(net, "hashed", k)
    p, back = matrix(subspace), torch.randn(net.size, dtype=torch.float64)
    v = torch.randn(k, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(flat(subspace(v)) @ back, v, create_graph=True)
    torch.testing.assert_close(found, p.T @ back)

    def gradient(back: Tensor) -> Tensor:
        found: Tensor = torch.func.vjp(lambda v: flat(subspace(v)), v.detach())[1](back)[0]
        return found

    torch.testing.assert_close(torch.func.jacrev(gradient)(back), p.T)
    many = torch.randn(3, net.size, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(gradient)(many), many @ p)


def test_weights_of_a_coordinate_are_read_from_first_to_last() -> None:
    """In a random order a GPU's cache would hold none of what the next rows need."""
    expansion = build(network(), "hashed", 5).expansion
    assert isinstance(expansion, Hashed)
    columns = expansion.weights.reshape(-1, 5).T
    present = expansion.signs_of_weights.reshape(-1, 5).T != 0
    read = [column[here] for column, here in zip(columns, present, strict=True)]
    assert all((column.diff() > 0).all() for column in read)
    assert sorted(torch.cat(read).tolist()) == list(range(network().size))


@given(
    st.sampled_from(["dense", "kronecker", "hashed"]),
    st.integers(1, 12),
    st.integers(1, 12),
    st.floats(0, 1),
    st.sampled_from(["layer", "none"]),
)
def test_columns_have_norm_one_and_every_weight_is_covered(
    kind: str, inputs: int, hidden: int, share: float, scale: str
) -> None:
    net = network(inputs, hidden)
    k = 1 + int(share * (net.size - 1))
    found = matrix(build(net, kind, k, scale))
    assert found.shape == (net.size, k)
    assert torch.allclose(found.norm(dim=0), torch.ones(k).double(), atol=1e-6)
    assert bool((found != 0).any(1).all())
    if kind == "hashed":
        assert torch.allclose(found.T @ found, torch.eye(k).double(), atol=1e-6)


def test_identity_adds_v_itself() -> None:
    net = network()
    subspace = build(net, "identity", 0)
    v = torch.arange(net.size).double()
    assert subspace.k == net.size
    assert (flat(subspace(v)) - subspace.theta_0 - v).abs().max() < 1e-12


def test_v_of_zero_gives_theta_0() -> None:
    subspace = build(network(), "kronecker", 4)
    assert (flat(subspace(torch.zeros(4).double())) == subspace.theta_0).all()


@pytest.mark.parametrize("kind", ["dense", "kronecker", "hashed"])
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(kind: str) -> None:
    config, net = SubspaceConfig(kind, 6), network()
    torch.manual_seed(0)
    first = Subspace(config, net, Stream(1))
    torch.manual_seed(1)
    assert Subspace(config, net, Stream(1)).fingerprint == first.fingerprint
    assert Subspace(config, net, Stream(1), dtype=torch.float64).fingerprint == first.fingerprint
    assert Subspace(config, net, Stream(2)).fingerprint != first.fingerprint


RECORDED = {
    "dense": "d287b9b913963f52cb2652f57b19ac60869d48cc4dd09f6af90e07fac0717b7f",
    "kronecker": "215944c46799bf9c11b8b762038ab641f5650bcc0ffbedd0f48fbacf8aac878f",
    "hashed": "0c8b3e5dae013cfcbfda8e9c0980134befe6caaa9bd16c0045f0a7f09957bd9c",
}


def test_the_bits_do_not_depend_on_torchs_default_type() -> None:
    first = Subspace(SubspaceConfig("hashed", 6), network(), Stream(1)).fingerprint
    torch.set_default_dtype(torch.float64)
    try:
        assert Subspace(SubspaceConfig("hashed", 6), network(), Stream(1)).fingerprint == first
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_bits_are_those_of_every_other_machine() -> None:
    """Recorded once: a change here breaks every checkpoint there is."""
    net = build_network("cnn-small", (1, 8, 8), 10, lambda x: x)
    found = {k: Subspace(SubspaceConfig(k, 100), net, Stream(0)).fingerprint for k in RECORDED}
    assert found == RECORDED


def test_resnet18_at_ten_thousand_takes_less_than_30_mb_and_two_products() -> None:
    net = build_network("resnet18", (3, 32, 32), 10, lambda x: x)
    subspace = Subspace(SubspaceConfig("kronecker", 10_000), net, Stream(0))
    held = sum(t.numel() * t.element_size() for t in subspace.expansion.tensors())
    assert held < 30e6
    with torch.profiler.profile() as profile:
        subspace(torch.zeros(10_000))
    assert sum(e.count for e in profile.key_averages() if e.key == "aten::mm") == 2


def test_k_above_d_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"k = 33 .* d = 32"):
        build(network(), "kronecker", 33)


def test_unknown_kinds_and_scales_are_refused() -> None:
    with pytest.raises(ConfigError, match="use one of dense, kronecker, hashed, identity"):
        build(network(), "sparse", 3)
    with pytest.raises(ConfigError, match="row_scale"):
        build(network(), "dense", 3, "rows")
    with pytest.raises(ConfigError, match="k = d = 32"):
        build(network(), "identity", 3)


def test_a_dense_expansion_that_cannot_fit_is_refused_before_it_is_made() -> None:
    tracemalloc.start()
    net = build_network("cnn", (3, 32, 32), 10, lambda x: x)
    with pytest.raises(ConfigError, match="kronecker"):
        Subspace(SubspaceConfig("dense", 10_000), net, Stream(0))
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["dense", "kronecker", "hashed"])
def test_an_expansion_in_bfloat16_moves_weights_like_one_in_float32(kind: str) -> None:
    net, v = network(30, 20), torch.randn(50, generator=torch.Generator().manual_seed(0))
    config = SubspaceConfig(kind, 50)
    exact, coarse = (
        Subspace(config, net, STREAM, compute=dtype) for dtype in (None, torch.bfloat16)
    )
    assert exact.fingerprint == coarse.fingerprint
    a, b = flat(exact(v)), flat(coarse(v))
    assert a.dtype == b.dtype == torch.float32
    assert (a - b).norm() <= (0.01 if kind == "kronecker" else 0) * (a - exact.theta_0).norm()
