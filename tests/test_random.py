from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowdup.random import Stream, distinct, philox

# Known-answer vectors of philox4x32-10, published with Random123 (kat_vectors).
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    words = [[int(w, 16) for w in text.split()] for text in (counter, key, expected)]
    found = philox(np.array([words[0]], np.uint32), (words[1][0], words[1][1]))
    assert found.tolist() == [words[2]]


def test_a_stream_is_the_same_bits_for_ever() -> None:
    stream = Stream(3).child("expansion", "left")
    assert stream.key == (0xFBD83A24, 0x45806E66)
    assert [hex(w) for w in stream.words(2)] == ["0x4f00e205", "0x129f37dc"]


@given(st.integers(0, 2**63), st.integers(1, 70), st.integers(1, 70))
def test_drawing_less_gives_a_prefix_of_drawing_more(seed: int, a: int, b: int) -> None:
    few, many = Stream(seed).words(min(a, b)), Stream(seed).words(max(a, b))
    assert (many[: few.size] == few).all()


@given(st.integers(0, 2**40), st.integers(1, 6), st.integers(1, 30))
def test_lanes_drawn_together_are_lanes_drawn_apart(first: int, count: int, n: int) -> None:
    stream = Stream(1).child("lanes")
    together = stream.substreams(first, count, n)
    apart = [stream.substreams(first + i, 1, n)[0] for i in range(count)]
    assert (together == np.stack(apart)).all()
    assert len({row.tobytes() for row in together}) == count or n == 0


def test_names_and_seeds_give_different_streams() -> None:
    streams = [Stream(0), Stream(1), Stream(0).child("a"), Stream(0).child("a", "b")]
    streams += [Stream(0).child("ab"), Stream(0).child(1), Stream(0).child("1")]
    assert len({s.words(4).tobytes() for s in streams}) == len(streams)


def test_floats_are_exact_functions_of_the_words() -> None:
    stream = Stream(5)
    words = [int(w) for w in stream.words(1000)]
    assert stream.uniform(1000).tolist() == [(2 * (w >> 9) + 1 - 2**23) / 2**23 for w in words]
    bits = [(words[i // 32] >> (i % 32)) & 1 for i in range(1000)]
    assert stream.signs(1000).tolist() == [2.0 * b - 1 for b in bits]
    assert stream.integers(1000, 10).tolist() == [w * 10 >> 32 for w in words]
    assert stream.permutation(1000).tolist() == sorted(range(1000), key=lambda i: words[i])


def test_uniforms_are_spread_as_they_should_be() -> None:
    draw = Stream(2).uniform(200_000).astype(np.float64)
    assert abs(draw.mean()) < 0.005
    assert abs(draw.var() - 1 / 3) < 0.005
    assert -1 < draw.min() < -0.999 and 0.999 < draw.max() < 1


def test_no_global_random_state_is_read_or_moved() -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
        stream = Stream(4)
        found.append([stream.uniform(10), stream.signs(10), stream.permutation(10)])
        assert (torch.get_rng_state() == before[0]).all()
        assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]
    assert all((a == b).all() for a, b in zip(*found, strict=True))


@given(st.integers(0, 60), st.integers(0, 10**6), st.integers(0, 99))
def test_distinct_numbers_are_as_many_as_asked_for(n: int, more: int, seed: int) -> None:
    found = distinct(iter(Stream(seed).words(n).tolist()), n, n + more)
    assert len(found) == len(set(found)) == n
    assert all(0 <= number < n + more for number in found)


def test_every_set_of_distinct_numbers_is_equally_likely() -> None:
    lanes = Stream(0).substreams(0, 10_000, 2)
    counts = Counter(frozenset(distinct(iter(lane), 2, 5)) for lane in lanes.tolist())
    assert len(counts) == 10
    assert all(900 < count < 1100 for count in counts.values())


def test_distinct_numbers_are_the_same_for_ever() -> None:
    assert distinct(iter([2**32 - 1, 0, 2**31, 2**30]), 4, 10**6) == [999996, 0, 499999, 250000]
    assert distinct(iter([0, 0, 0]), 3, 3) == [0, 1, 2]
