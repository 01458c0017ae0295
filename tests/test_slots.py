import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowdup.batches import batch_plans
from flowdup.engines.slots import schedule, slots_needed
from flowdup.random import Stream

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(SIZES, st.integers(0, 5), st.integers(1, 2))
def test_slots_take_every_batch_of_every_client_once_and_in_order(
    sizes: list[int], limit: int, epochs: int
) -> None:
    plans = list(batch_plans(Stream(0), dict(enumerate(sizes)), epochs, 10).values())
    first = np.cumsum([0, *sizes[:-1]]).tolist()
    slots = slots_needed([len(plan) for plan in plans], limit)
    points, progress = schedule(plans, first, slots)
    assert points.shape[1] == slots <= (limit or len(sizes))
    busy = progress[..., 0] >= 0
    assert busy.sum() == sum(map(len, plans))
    assert (points[~busy] == -1).all()
    seen = []
    for slot in range(slots):
        for step in np.flatnonzero(busy[:, slot]):
            before, after = progress[step, slot]
            seen += [points[step - before : step + 1 + after, slot]] if before == 0 else []
            assert before == 0 or progress[step - 1, slot].tolist() == [before - 1, after + 1]
    wanted = [np.where(plan < 0, -1, plan + row) for plan, row in zip(plans, first, strict=True)]
    assert sorted(a.tobytes() for a in seen) == sorted(a.tobytes() for a in wanted)


@given(SIZES)
def test_a_position_has_the_plan_that_it_would_have_alone(sizes: list[int]) -> None:
    points = {3 * i + 1: n for i, n in enumerate(sizes)}
    together = batch_plans(Stream(5), points, 2, 8)
    assert list(together) == list(points)
    for position, n in points.items():
        alone = batch_plans(Stream(5), {position: n}, 2, 8)
        assert (together[position] == alone[position]).all()
