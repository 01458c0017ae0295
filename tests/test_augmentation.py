"""Changed images: as they should be, by the seed, in training alone and in every engine."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from small import SPEC, STREAM, client, engine, first_task, method, ragged_clients
from test_methods import doubles
from torch import Tensor

from flowdup.aggregation import total
from flowdup.augmentation import POINT, Augmentation, quarter_turns
from flowdup.batches import PointPool, batch_plan, batch_plans, local_batches
from flowdup.client import ClientConfig
from flowdup.data import ClientData
from flowdup.data.clients import LazyClients
from flowdup.engines import SupportQuery
from flowdup.errors import ConfigError
from flowdup.methods import Params
from flowdup.optimizers import OptimizerConfig
from flowdup.random import Stream

CPU = torch.device("cpu")
PLAIN = ClientConfig(2, 10, 1.0, OptimizerConfig("sgd", 0.05))
ALL = replace(PLAIN, mirror=True, shift=2, rotate_batches=True)
ONE_BATCH = Stream(0).words(1).reshape(())


def shifted(image: Tensor, down: int, right: int, corner: Tensor) -> Tensor:
    """An image [C, H, W] moved by so many pixels; where it leaves a side, a colour [C] comes in."""
    (_, height, width), room = image.shape, 8
    large = corner[:, None, None].expand(-1, height + 2 * room, width + 2 * room).clone()
    large[:, room : room + height, room : room + width] = image
    return large[:, room - down :, room - right :][:, :height, :width]


def colored(points: int, height: int = 5, width: int = 7) -> ClientData:
    """Images of three channels, not square, no pixel black."""
    drawn = Stream(3).integers(points * 3 * height * width, 255) + 1
    x = torch.from_numpy(drawn.astype(np.uint8)).reshape(points, 3, height, width)
    return ClientData(x, torch.arange(points) % 4)


@pytest.mark.parametrize(("mirror", "shift"), [(True, 0), (False, 1), (True, 1), (True, 4)])
def test_an_image_is_one_of_those_that_mirroring_and_shifting_make(
    mirror: bool, shift: int
) -> None:
    data, how = colored(9), Augmentation(mirror, shift)
    plan = batch_plan(Stream(5), 0, 9, 12, 4, how)
    found = local_batches(data, plan, CPU, torch.float32, how)
    steps, rows = range(-shift, shift + 1), torch.from_numpy(plan).flatten()
    possible = [(m, d, r) for m in sorted({False, mirror}) for d in steps for r in steps]
    seen = set()
    for x, y, row in zip(found.x.flatten(0, 1), found.y.flatten(), rows, strict=True):
        if row < 0:
            continue
        image = data.x[row & POINT]
        changes = [(image.flip(2) if m else image, d, r) for m, d, r in possible]
        made = torch.stack([shifted(*change, image[:, 0, 0]) for change in changes])
        (number,) = (made == x).flatten(1).all(1).nonzero().flatten().tolist()
        seen.add(possible[number])
        assert int(y) == int(row & POINT) % 4
    assert shift == 4 or seen == set(possible)
    assert len(seen) > 1


def square(points: int) -> ClientData:
    data = colored(points, 6, 6)
    return ClientData(data.x, data.y)


def test_a_batch_is_rotated_as_one_by_every_quarter_turn() -> None:
    data, how = square(9), Augmentation(rotate_batches=True)
    plan = batch_plan(Stream(5), 0, 9, 12, 4, how)
    found, seen = local_batches(data, plan, CPU, torch.float32, how), set()
    for x, rows in zip(found.x, torch.from_numpy(plan), strict=True):
        there = rows >= 0
        images = data.x[rows[there] & POINT]
        possible = [torch.rot90(images, turns, (2, 3)) for turns in range(4)]
        [turns] = [n for n, rotated in enumerate(possible) if torch.equal(rotated, x[there])]
        seen.add(turns)
    assert seen == {0, 1, 2, 3}


def test_the_batches_of_a_round_are_rotated_each_for_itself() -> None:
    plan = batch_plan(Stream(5), 0, 9, 12, 4, Augmentation(rotate_batches=True))
    turns = quarter_turns(torch.from_numpy(plan[:, 0]))
    assert len(turns) == 36
    assert torch.bincount(turns, minlength=4).min() >= 4


def test_an_image_is_mirrored_and_shifted_before_its_batch_is_rotated() -> None:
    data, still, rotated = square(9), Augmentation(True, 2), Augmentation(True, 2, True)
    plans = [batch_plan(Stream(5), 0, 9, 12, 4, how) for how in (still, rotated)]
    before, after = (
        local_batches(data, plan, CPU, torch.float32, how).x
        for plan, how in zip(plans, (still, rotated), strict=True)
    )
    for one, other, rows in zip(before, after, torch.from_numpy(plans[1]), strict=True):
        there = rows >= 0
        turns = int(quarter_turns(rows[there])[0])
        assert torch.equal(torch.rot90(one, turns, (2, 3))[there], other[there])


def test_every_quarter_turn_is_as_frequent() -> None:
    words = Stream(1).words(40_000)
    change = Augmentation(rotate_batches=True).changes(
        words.reshape(-1, 1), Stream(2).words(40_000)
    )
    counts = torch.bincount(quarter_turns(torch.from_numpy(change)).flatten(), minlength=4)
    assert (counts / 40_000).tolist() == pytest.approx([0.25] * 4, abs=0.01)


def test_half_of_the_points_are_mirrored_and_every_shift_is_as_frequent() -> None:
    how = Augmentation(True, 2)
    change = torch.from_numpy(how.changes(Stream(1).words(40_000), ONE_BATCH) >> 32)
    assert (change & 1).double().mean() == pytest.approx(0.5, abs=0.01)
    for place in (1, 9):
        counts = torch.bincount(change >> place & 255, minlength=5)
        assert counts.shape == (5,)
        assert (counts / 40_000).tolist() == pytest.approx([0.2] * 5, abs=0.01)
    # each chosen without regard to the others
    together = torch.bincount((change & 1) * 25 + (change >> 1 & 255) * 5 + (change >> 9))
    assert (together / 40_000).tolist() == pytest.approx([0.02] * 50, abs=0.004)


def test_a_white_background_stays_white() -> None:
    image = torch.full((1, 1, 9, 9), 255, dtype=torch.uint8)
    image[0, 0, 3:6, 3:6] = 0
    how = Augmentation(shift=2)
    rows = torch.from_numpy(how.changes(Stream(1).words(100), ONE_BATCH))
    x = PointPool.of({0: ClientData(image)}, CPU, how).batch(rows, torch.float32).x
    assert ((x == 0).flatten(1).sum(1) == 9).all()


def test_the_last_point_that_a_row_can_name_keeps_its_number() -> None:
    changes = Augmentation(True, 127, True).changes(Stream(1).words(1000), ONE_BATCH)
    assert ((changes | POINT) & POINT == POINT).all()
    assert ((changes | POINT) >> 32 == changes >> 32).all()
    assert (changes >= 0).all()


def test_an_epoch_still_has_every_point_once_and_in_the_order_that_it_had() -> None:
    how = Augmentation(True, 1)
    plain, changed = (batch_plan(Stream(2), 3, 13, 2, 5, a) for a in (Augmentation(), how))
    assert np.array_equal(np.where(changed < 0, -1, changed & POINT), plain)
    assert ((changed < 0) == (plain < 0)).all()


def test_a_clients_changes_depend_on_the_seed_and_its_place_alone() -> None:
    how, sizes = Augmentation(True, 2), {4: 13, 2: 33, 7: 1}
    together = batch_plans(Stream(2), sizes, 2, 5, how)
    for position, points in sizes.items():
        alone = batch_plan(Stream(2), position, points, 2, 5, how)
        assert np.array_equal(together[position], alone)
    assert not np.array_equal(together[4], batch_plan(Stream(1), 4, 13, 2, 5, how))


def trained(kind: str, config: ClientConfig, clients: Sequence[ClientData]) -> Params:
    m = method("flowdup", torch.float64)
    psi = doubles(m)
    reply = total(engine(kind, m, "float64", config, clients).train(first_task(m, psi, 6)))
    return {n: d.clone() for n, d in reply.whole_delta().items()}


@pytest.fixture(scope="module")
def sequential() -> Params:
    return trained("sequential", ALL, ragged_clients())


def apart(a: Params, b: Params) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def test_both_engines_give_the_same_psi(sequential: Params) -> None:
    assert apart(trained("batched", ALL, ragged_clients()), sequential) < 1e-10


def test_the_same_seed_gives_the_same_bits(sequential: Params) -> None:
    assert apart(trained("sequential", ALL, ragged_clients()), sequential) == 0


def test_clients_that_are_made_on_demand_are_changed_alike(sequential: Params) -> None:
    clients = ragged_clients()
    lazy = LazyClients(len(clients), clients.__getitem__, len(clients), 33)
    assert apart(trained("batched", ALL, lazy), sequential) < 1e-10


def test_training_sees_changed_images_only_where_that_is_asked_for(sequential: Params) -> None:
    plain = trained("sequential", PLAIN, ragged_clients())
    assert apart(plain, sequential) > 1e-6
    for one in (replace(PLAIN, mirror=True), replace(PLAIN, rotate_batches=True)):
        assert apart(trained("sequential", one, ragged_clients()), plain) > 1e-6


@pytest.mark.parametrize("kind", ["sequential", "batched"])
def test_personal_models_and_their_answers_know_nothing_of_augmentation(kind: str) -> None:
    m = method("flowdup", torch.float64)
    psi, x = doubles(m), client(1, 13).x
    plain, both = (
        engine(kind, m, "float64", c).logits(psi, [SupportQuery(x, x)])[0] for c in (PLAIN, ALL)
    )
    assert torch.equal(plain, both)


def test_points_on_a_device_are_the_pixels_as_stored() -> None:
    data, how = colored(6), Augmentation(True, 2)
    pool = PointPool.of({0: data}, CPU, how)
    unchanged = torch.arange(6) | 2 << 33 | 2 << 41  # two down and two right of the first place
    assert torch.equal(pool.batch(unchanged, torch.float32).x, data.x)
    assert pool.batch(unchanged, torch.float32).x.dtype == torch.uint8


def test_inputs_that_are_no_images_are_refused() -> None:
    rows = ClientData(torch.rand(5, 12))
    with pytest.raises(ConfigError, match="are for images, and an input has 1 dimensions"):
        PointPool.of({0: rows}, CPU, Augmentation(True))
    assert PointPool.of({0: rows}, CPU).x.shape == (5, 12)


def test_images_that_are_not_square_are_not_rotated() -> None:
    with pytest.raises(ConfigError, match="square images, and these have 5 x 7 pixels"):
        PointPool.of({0: colored(2)}, CPU, Augmentation(rotate_batches=True))
    assert PointPool.of({0: square(2)}, CPU, Augmentation(rotate_batches=True)).x.shape == (
        2,
        6,
        6,
        3,
    )


def test_shifts_that_leave_nothing_or_do_not_fit_a_row_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose less than 5"):
        PointPool.of({0: colored(2)}, CPU, Augmentation(shift=5))
    with pytest.raises(ConfigError, match=r"client.shift.*between 0 and 127"):
        ClientConfig(shift=128)
    with pytest.raises(ConfigError, match=r"client.shift"):
        ClientConfig(shift=-1)


def test_more_points_than_a_row_can_name_are_refused() -> None:
    one = torch.zeros(1, *SPEC.shape, dtype=torch.uint8)
    Augmentation(True).check(one.expand(POINT, -1, -1, -1))
    with pytest.raises(ConfigError, match="at most 4,294,967,295 points"):
        Augmentation(True).check(one.expand(POINT + 1, -1, -1, -1))


def test_without_augmentation_a_plan_is_the_one_it_always_was() -> None:
    plan = batch_plan(STREAM, 0, 13, 1, 10, Augmentation())
    order = np.argsort(STREAM.child(0).substreams(0, 1, 13)[0], kind="stable")
    assert plan[0].tolist() == order[:10].tolist()
    assert plan[1].tolist() == [*order[10:12].tolist(), -1, -1, -1, order[12], -1, -1, -1, -1]
