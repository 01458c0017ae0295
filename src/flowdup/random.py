"""Counter-based random numbers: the same bits on every machine.

The generator is Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011).  It has no state: the i-th word of a stream is a function of the stream's key
and of i alone.  Integers become floats by exactly representable steps, so that theta_0 and P agree
bit by bit between a server, a client, a CPU, a GPU and a browser.  No global random state is read
or moved.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox 4x32-10: counters [n, 4] under a key of two 32-bit words give words [n, 4]."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def distinct(words: Iterator[int], n: int, high: int) -> list[int]:
    """n different numbers of 0 .. high-1, made from n words in time and memory of n alone.

    Floyd's algorithm (Bentley, "A sample of brilliance", CACM 1987): for j = high-n .. high-1, the
    number floor(word * (j+1) / 2^32), or j itself if that one is taken.  Every set is equally
    likely; the order is not random.
    """
    chosen: dict[int, None] = {}
    for last in range(high - n, high):
        number = next(words) * (last + 1) >> 32
        chosen[last if number in chosen else number] = None
    return list(chosen)


@dataclass(frozen=True)
class Stream:
    """A named, endless sequence of random words: `Stream(seed).child("cohort", round)`.

    The key is the first 8 bytes (two little-endian words) of SHA-256 over the JSON text
    `[seed, name, ...]` without spaces.  A stream has 2^64 substreams, independent sequences that
    are drawn together cheaply (one per client of a cohort, say): word 4b + i of substream l is word
    i of Philox at the counter (b mod 2^32, b div 2^32, l mod 2^32, l div 2^32).
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def child(self, *names: str | int) -> "Stream":
        """The stream of a longer name; streams of different names are independent."""
        return Stream(self.seed, self.path + names)

    @cached_property
    def key(self) -> tuple[int, int]:
        """Philox's key: the first 64 bits of SHA-256 of seed and name."""
        text = json.dumps([self.seed, *self.path], separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")

    def substreams(self, first: int, count: int, n: int) -> Words:
        """The first n words of `count` substreams from number `first` on."""  # [count, n]
        blocks = np.arange(-(-n // 4), dtype=np.uint64)
        numbers = np.arange(first, first + count, dtype=np.uint64)
        counter = np.empty((count, blocks.size, 4), np.uint32)
        counter[..., 0], counter[..., 1] = blocks & _LOW, blocks >> _SHIFT
        counter[..., 2], counter[..., 3] = (numbers & _LOW)[:, None], (numbers >> _SHIFT)[:, None]
        words: Words = philox(counter.reshape(-1, 4), self.key).reshape(count, 4 * blocks.size)
        return words[:, :n]

    def words(self, n: int) -> Words:
        """The first n words, uint32 [n]."""
        return self.substreams(0, 1, n).reshape(-1)

    def signs(self, n: int) -> NDArray[np.float32]:
        """-1 or +1: bit i mod 32 (least significant first) of word i div 32, zero meaning -1."""
        octets = self.words(-(-n // 32)).astype("<u4").view(np.uint8)
        bits = np.unpackbits(octets, bitorder="little")[:n]
        return bits.astype(np.float32) * np.float32(2) - np.float32(1)

    def uniform(self, n: int) -> NDArray[np.float32]:
        """Uniform on (-1, 1), symmetric: (2 m + 1 - 2^23) / 2^23 with m the top 23 bits of a word.

        Every step is exact in float32.
        """
        m = (self.words(n) >> np.uint32(9)).astype(np.int32)
        return (2 * m + 1 - 2**23).astype(np.float32) * np.float32(2.0**-23)

    def integers(self, n: int, high: int) -> NDArray[np.int64]:
        """Uniform on 0 .. high-1 (high at most 2^32): floor(word * high / 2^32)."""
        return ((self.words(n).astype(np.uint64) * np.uint64(high)) >> _SHIFT).astype(np.int64)

    def permutation(self, n: int) -> NDArray[np.int64]:
        """0 .. n-1 in random order: the stable sorting order of n words."""
        return np.argsort(self.words(n), kind="stable").astype(np.int64)


class ZeroStream(Stream):
    """A stream of zeros, made without drawing anything: to ask an `init` for names and shapes.

    Beware: nothing about its values is random, so nothing may be trained from them.
    """

    def child(self, *names: str | int) -> Stream:
        """Itself: every name gives zeros."""
        return self

    def substreams(self, first: int, count: int, n: int) -> Words:
        """Zeros [count, n]."""
        return np.zeros((count, n), np.uint32)

    def uniform(self, n: int) -> NDArray[np.float32]:
        """Zeros in memory that the system gives only once it is written to."""
        return np.zeros(n, np.float32)
