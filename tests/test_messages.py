"""What passes between server and client can be checked without knowing the method."""

from dataclasses import replace

import pytest
import torch
from small import METHODS, STREAM, broadcast, engine, first_task, method, ragged_clients

from flowdup.client import ClientConfig
from flowdup.errors import MessageError
from flowdup.messages import Reply, Task, schema_of
from flowdup.rank_one import Factors

PSI = {"w": torch.zeros(3, 2), "b": torch.zeros(3)}
TASK = Task(4, PSI, {"mu": torch.ones(())}, {0: 17, 1: 5})
REPLY = Reply(4, {n: torch.ones_like(p) for n, p in PSI.items()}, torch.tensor(1.0), 5, 8)
FACTORED = replace(
    REPLY, delta={"b": torch.ones(3)}, factors={"w": Factors(torch.ones(4, 3), torch.ones(4, 2))}
)


@pytest.mark.parametrize("kind", ["sequential", "batched"])
@pytest.mark.parametrize("name", METHODS)
def test_every_engine_answers_with_replies_that_fit_the_task(name: str, kind: str) -> None:
    m, clients = method(name, torch.float64), ragged_clients()
    psi = {n: p.double() for n, p in m.init(STREAM).items()}
    task = first_task(m, psi, len(clients))
    runner = engine(kind, m, "float64", ClientConfig(batch_size=10), clients)
    replies = [r.check(1, schema_of(psi)).check_finite() for r in runner.train(task)]
    assert sum(reply.clients for reply in replies) == len(clients)
    assert sum(reply.points for reply in replies) == sum(map(len, clients))
    assert task.start.keys() == psi.keys() | broadcast(m, psi).keys()


def test_a_member_is_sent_nothing_about_the_others() -> None:
    alone = TASK.for_member(1)
    assert alone.cohort == {1: 5}
    assert (alone.round, alone.psi, alone.broadcast) == (4, PSI, TASK.broadcast)


def test_the_size_of_a_message_is_that_of_its_tensors() -> None:
    assert TASK.bytes == 4 * (6 + 3 + 1)
    assert REPLY.bytes == 4 * (6 + 3)
    assert FACTORED.bytes == 4 * (4 * 3 + 4 * 2 + 3)


def test_factors_stand_for_their_product() -> None:
    whole = FACTORED.check(4, schema_of(PSI)).whole_delta()
    assert {n: p.tolist() for n, p in whole.items()} == {"w": [[4.0, 4.0]] * 3, "b": [1.0] * 3}


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (replace(REPLY, round=3), "to round 3 came in round 4"),
        (replace(REPLY, delta={"w": PSI["w"]}), r"other tensors than psi \('b'\)"),
        (replace(REPLY, delta=REPLY.delta | {"x": PSI["b"]}), r"other tensors than psi \('x'\)"),
        (replace(FACTORED, delta=REPLY.delta), r"other tensors than psi \('w'\)"),
        (replace(REPLY, delta=PSI | {"b": torch.zeros(2)}), r"'b' of shape \(2,\)"),
        (replace(REPLY, delta=PSI | {"b": torch.zeros(3).double()}), "type torch.float64"),
        (replace(FACTORED, factors={"w": Factors(torch.ones(4, 3), torch.ones(5, 2))}), "right"),
        (
            replace(REPLY, delta={"w": PSI["w"]}, factors={"b": FACTORED.factors["w"]}),
            "factors of 'b' that cannot be",
        ),
        (replace(REPLY, loss=torch.zeros(2)), "loss or counts"),
        (replace(REPLY, points=9), "loss or counts"),
        (replace(REPLY, clients=0), "loss or counts"),
        (replace(REPLY, points=0, rows=0), "loss or counts"),
        (replace(REPLY, loss=torch.tensor(1)), "loss or counts"),
        (replace(FACTORED, clients=2), "factors of 'w' that cannot be"),
        (replace(FACTORED, factors={"w": Factors(torch.ones(()), torch.ones(()))}), "factors"),
    ],
)
def test_a_reply_that_does_not_fit_is_refused(reply: Reply, sentence: str) -> None:
    with pytest.raises(MessageError, match=sentence):
        reply.check(4, schema_of(PSI))


def test_a_task_with_another_psi_is_refused() -> None:
    assert TASK.check(schema_of(PSI)) is TASK
    for odd in ({"w": PSI["w"]}, PSI | {"b": torch.zeros(2)}, PSI | {"b": torch.zeros(3).int()}):
        with pytest.raises(MessageError):
            replace(TASK, psi=odd).check(schema_of(PSI))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    assert REPLY.check_finite() is REPLY
    odd = {"b": torch.tensor([0.0, bad, 0.0])}
    factors = {"w": Factors(torch.full((4, 3), bad), torch.ones(4, 2))}
    for reply in (
        replace(REPLY, delta=PSI | odd),
        replace(REPLY, loss=torch.tensor(bad)),
        replace(FACTORED, factors=factors),
    ):
        with pytest.raises(MessageError, match="NaN or infinite"):
            reply.check_finite()
