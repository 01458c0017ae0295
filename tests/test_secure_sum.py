"""Secure aggregation: the sum is exact, members may disappear, and nobody's numbers are seen."""

from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flowdup.errors import ConfigError, MessageError
from flowdup.secure_sum import (
    FixedPoint,
    Member,
    Numbers,
    PublicKeys,
    Shares,
    check_threshold,
    join_secret,
    pair_seed,
    route,
    signed_mask,
    split_secret,
    unmasked_sum,
)

CONTEXT = b"round 7"


class Sum:
    """A secure sum of members in one process; some may disappear before each of its steps."""

    def __init__(self, numbers: list[Numbers], threshold: int) -> None:
        who = range(len(numbers))
        self.numbers, self.threshold = numbers, threshold
        self.members = {n: Member(n, who, threshold, CONTEXT) for n in who}
        self.keys = {n: m.advertise() for n, m in self.members.items()}
        self.masked: dict[int, bytes] = {}

    def run(
        self,
        before_sharing: Collection[int] = (),
        before_masking: Collection[int] = (),
        before_revealing: Collection[int] = (),
    ) -> Numbers:
        sealed = {n: m.share(self.keys) for n, m in self.members.items() if n not in before_sharing}
        inbox = route(sealed)
        self.masked = {
            n: self.members[n].mask(self.numbers[n], inbox[n])
            for n in sealed
            if n not in before_masking
        }
        revealed = {
            n: self.members[n].reveal(self.masked.keys())
            for n in self.masked
            if n not in before_revealing
        }
        return self.unmask(sealed.keys(), revealed)

    def unmask(self, shared: Collection[int], revealed: dict[int, Shares]) -> Numbers:
        return unmasked_sum(self.keys, shared, self.masked, revealed, self.threshold, CONTEXT)


def some_numbers(members: int, count: int = 50) -> list[Numbers]:
    draw = np.random.default_rng(members)
    return [draw.integers(0, 2**32, count, np.uint32) for _ in range(members)]


def plain(numbers: list[Numbers], who: Collection[int]) -> list[int]:
    return [sum(int(numbers[n][i]) for n in who) % 2**32 for i in range(numbers[0].size)]


@pytest.mark.parametrize(("members", "threshold"), [(3, 2), (3, 3), (6, 4), (11, 8)])
def test_the_sum_is_exact(members: int, threshold: int) -> None:
    numbers = some_numbers(members)
    assert Sum(numbers, threshold).run().tolist() == plain(numbers, range(members))


@pytest.mark.parametrize("gone", [{0}, {5}, {1, 4}])
def test_the_sum_is_of_those_who_sent_numbers_though_others_left_after_sharing(
    gone: set[int],
) -> None:
    numbers = some_numbers(6)
    found = Sum(numbers, 4).run(before_masking=gone)
    assert found.tolist() == plain(numbers, {*range(6)} - gone)


def test_members_may_leave_before_sharing_and_after_masking() -> None:
    numbers = some_numbers(7)
    found = Sum(numbers, 4).run({0}, {3}, {6})
    assert found.tolist() == plain(numbers, {1, 2, 4, 5, 6})  # 6 had sent its numbers


@pytest.mark.parametrize("step", ["before_sharing", "before_masking", "before_revealing"])
def test_too_few_survivors_are_refused(step: str) -> None:
    with pytest.raises(MessageError, match="3 members are left in a secure sum and it needs 4"):
        Sum(some_numbers(6), 4).run(**{step: {0, 1, 2}})


def test_a_member_itself_refuses_to_reveal_for_too_few() -> None:
    fresh = Sum(some_numbers(6), 4)
    inbox = route({n: m.share(fresh.keys) for n, m in fresh.members.items()})
    fresh.members[0].mask(fresh.numbers[0], inbox[0])
    with pytest.raises(MessageError, match="it needs 4"):
        fresh.members[0].reveal({0, 1, 2})
    with pytest.raises(MessageError, match="survivors that cannot be"):
        fresh.members[0].reveal({1, 2, 3, 4})  # it is alive itself
    with pytest.raises(MessageError, match="survivors that cannot be"):
        fresh.members[0].reveal({0, 1, 2, 99})
    fresh.members[0].reveal({0, 1, 2, 3})
    with pytest.raises(MessageError, match="twice to reveal"):
        fresh.members[0].reveal({0, 1, 2, 3, 4})  # once: both secrets of 4 would be known


def test_a_member_reveals_one_secret_of_each_other() -> None:
    whole = Sum(some_numbers(6), 4)
    inbox = route({n: m.share(whole.keys) for n, m in whole.members.items()})
    whole.members[1].mask(whole.numbers[1], inbox[1])
    shown = whole.members[1].reveal({0, 1, 2, 3, 4})
    assert (set(shown.seeds), set(shown.keys)) == ({0, 1, 2, 3, 4}, {5})


def chi_square(numbers: NDArray[np.uint32]) -> float:
    """Of the numbers' bytes against the uniform distribution: about 255, with deviation 22.6."""
    counts = np.bincount(numbers.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float(((counts - expected) ** 2 / expected).sum())


def test_a_member_masks_once_since_two_sets_of_numbers_would_tell_their_difference() -> None:
    numbers: list[Numbers] = [np.arange(5, dtype=np.uint32) for _ in range(4)]
    fresh = Sum(numbers, 3)
    inbox = route({n: m.share(fresh.keys) for n, m in fresh.members.items()})
    fresh.members[0].mask(numbers[0], inbox[0])
    with pytest.raises(MessageError, match="twice to mask"):
        fresh.members[0].mask(np.zeros(5, np.uint32), inbox[0])
    with pytest.raises(MessageError, match="twice to share"):
        fresh.members[0].share(fresh.keys)


def test_what_the_coordinator_sees_of_a_member_is_uniform_and_without_masks_it_is_not() -> None:
    count = 50_000
    update = FixedPoint(1.0, 5).encode(np.random.default_rng(1).normal(0, 0.01, count))
    whole = Sum([update] * 5, 3)
    whole.run()
    seen = [np.frombuffer(content, np.uint32) for content in whole.masked.values()]
    assert all(abs(chi_square(one) - 255) < 6 * 22.6 for one in seen)
    assert chi_square(update) > 1e5
    pairs = [(a, b) for i, a in enumerate(seen) for b in seen[:i]]
    assert all(abs(chi_square(a - b) - 255) < 6 * 22.6 for a, b in pairs)  # no mask is used twice


def test_without_its_own_mask_a_member_that_is_late_would_be_seen() -> None:
    """Why there are two: with the pairwise masks of a member known, its numbers stay hidden."""
    whole = Sum(some_numbers(4), 3)
    whole.run()
    member = whole.members[2]
    seen = np.frombuffer(whole.masked[2], np.uint32).copy()
    for other, keys in whole.keys.items():
        if other != 2:
            seed = pair_seed(member._masks, keys.masks, CONTEXT)
            seen -= signed_mask(seed, 2, other, seen.size)
    assert seen.tolist() != whole.numbers[2].tolist()


def test_fewer_shares_than_the_threshold_say_nothing() -> None:
    """For two shares of three, every secret is possible: some third share gives it."""
    shares = split_secret(b"s" * 32, 3, [0, 1, 2, 3])
    assert join_secret(shares, 3) == b"s" * 32
    assert join_secret({n: shares[n] for n in (3, 1, 0)}, 3) == b"s" * 32
    with pytest.raises(MessageError, match="needs 3"):
        join_secret({n: shares[n] for n in (0, 1)}, 3)
    other = split_secret(b"t" * 32, 3, [0, 1, 2, 3])
    with pytest.raises(MessageError, match="do not fit together"):
        join_secret({0: shares[0], 1: shares[1], 2: other[2]}, 3)


@given(
    st.lists(st.lists(st.floats(-2, 2), min_size=4, max_size=4), min_size=3, max_size=6),
)
@settings(max_examples=30, deadline=None)
def test_a_sum_of_real_numbers_is_right_to_a_step_per_client(rows: list[list[float]]) -> None:
    coding = FixedPoint(2.0, len(rows))
    encoded = [coding.encode(np.array(row)) for row in rows]
    found = coding.decode(Sum(encoded, len(rows) // 2 + 1).run())
    wanted = np.array(rows).sum(0)
    assert np.abs(found - wanted).max() <= 0.5001 * coding.step * len(rows)
    exact = np.stack([e.astype(np.int32).astype(np.int64) for e in encoded]).sum(0)
    assert np.array_equal(found, exact * coding.step)


def test_the_largest_sum_does_not_wrap() -> None:
    coding = FixedPoint(3.0, 1000)
    total = np.zeros(2, np.uint32)
    for _ in range(1000):
        total = total + coding.encode(np.array([3.0, -3.0]))
    assert coding.decode(total) == pytest.approx([3000.0, -3000.0], rel=1e-5)


@pytest.mark.parametrize("bad", [1.1, -2.0, float("nan"), float("inf")])
def test_numbers_out_of_bounds_are_refused(bad: float) -> None:
    with pytest.raises(MessageError, match="clip it first"):
        FixedPoint(1.0, 5).encode(np.array([0.0, bad]))


@pytest.mark.parametrize(("members", "threshold"), [(2, 2), (6, 3), (6, 7), (5, 0)])
def test_a_senseless_threshold_is_refused(members: int, threshold: int) -> None:
    with pytest.raises(ConfigError, match="more than half"):
        check_threshold(members, threshold)
    with pytest.raises(ConfigError):
        Member(0, range(members), threshold, CONTEXT)


def test_shares_that_were_changed_or_are_for_another_are_refused() -> None:
    whole = Sum(some_numbers(4), 3)
    inbox = route({n: m.share(whole.keys) for n, m in whole.members.items()})
    changed = bytes([inbox[0][1][0] ^ 1]) + inbox[0][1][1:]
    for bad in ({1: changed}, {1: inbox[2][1]}, {2: inbox[0][1]}, {1: b""}, {9: inbox[0][1]}):
        with pytest.raises(MessageError, match="cannot be opened"):
            whole.members[0].mask(whole.numbers[0], inbox[0] | bad)


def test_a_key_in_anothers_name_is_refused() -> None:
    whole = Sum(some_numbers(4), 3)
    forged = whole.keys | {0: whole.keys[1]}
    for keys in (forged, {n: k for n, k in whole.keys.items() if n != 0}):
        with pytest.raises(MessageError, match="not those that were told"):
            whole.members[0].share(keys)
    zero = whole.keys | {1: PublicKeys(bytes(32), bytes(32))}
    with pytest.raises(MessageError, match="is none"):
        whole.members[0].share(zero)


def test_false_shares_are_noticed_by_the_coordinator() -> None:
    whole = Sum(some_numbers(5), 3)
    sealed = {n: m.share(whole.keys) for n, m in whole.members.items()}
    inbox = route(sealed)
    whole.masked = {n: whole.members[n].mask(whole.numbers[n], inbox[n]) for n in range(4)}
    revealed = {n: whole.members[n].reveal(range(4)) for n in range(4)}
    lie = Shares(revealed[0].seeds, {4: revealed[0].keys[4][:-1] + b"\x00"})
    with pytest.raises(MessageError, match="do not"):
        whole.unmask(sealed.keys(), revealed | {0: lie})
    short = {0: whole.masked[0][:-4]}
    whole.masked |= short
    with pytest.raises(MessageError, match="another number of numbers"):
        whole.unmask(sealed.keys(), revealed)
    with pytest.raises(MessageError, match="had left"):
        whole.unmask({0, 1, 2}, revealed)
