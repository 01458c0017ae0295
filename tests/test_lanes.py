import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowdup.client import ClientConfig, batch_plans
from flowdup.engines.lanes import lanes_needed, schedule
from flowdup.random import Stream

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(SIZES, st.integers(0, 5), st.integers(1, 2))
def test_lanes_take_every_batch_of_every_client_once_and_in_order(
    sizes: list[int], limit: int, epochs: int
) -> None:
    config = ClientConfig(epochs, 10)
    plans = list(batch_plans(Stream(0), config, dict(enumerate(sizes))).values())
    first = np.cumsum([0, *sizes[:-1]]).tolist()
    lanes = lanes_needed([len(plan) for plan in plans], limit)
    points, marks = schedule(plans, first, lanes)
    assert points.shape[1] == lanes <= (limit or len(sizes))
    busy = marks[..., 0] >= 0
    assert busy.sum() == sum(map(len, plans))
    assert (points[~busy] == -1).all()
    seen = []
    for lane in range(lanes):
        for step in np.flatnonzero(busy[:, lane]):
            before, after = marks[step, lane]
            seen += [points[step - before : step + 1 + after, lane]] if before == 0 else []
            assert before == 0 or marks[step - 1, lane].tolist() == [before - 1, after + 1]
    wanted = [np.where(plan < 0, -1, plan + row) for plan, row in zip(plans, first, strict=True)]
    assert sorted(a.tobytes() for a in seen) == sorted(a.tobytes() for a in wanted)


@given(SIZES)
def test_a_lane_has_the_plan_that_it_would_have_alone(sizes: list[int]) -> None:
    config, points = ClientConfig(2, 8), {3 * i + 1: n for i, n in enumerate(sizes)}
    together = batch_plans(Stream(5), config, points)
    assert list(together) == list(points)
    for lane, n in points.items():
        assert (together[lane] == batch_plans(Stream(5), config, {lane: n})[lane]).all()
