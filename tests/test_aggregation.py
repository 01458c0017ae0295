"""One update from the replies of a cohort."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from small import STREAM, engine, method

from flowdup.aggregation import Update, mean, one_by_one, total
from flowdup.client import ClientConfig
from flowdup.errors import ConfigError
from flowdup.messages import Reply
from flowdup.optimizers import OptimizerConfig
from flowdup.params import Params
from flowdup.rank_one import Factors
from flowdup.server import ServerConfig, initial_state, train

PSI = {"w": torch.zeros(3, 2), "b": torch.zeros(3)}


def reply(number: int) -> Reply:
    draw = torch.Generator().manual_seed(number)
    factors = {"w": Factors(*(torch.randn(number, n, generator=draw) for n in (3, 2)))}
    delta = {"b": torch.randn(3, generator=draw)}
    return Reply(1, delta, torch.tensor(float(number)), number, 2 * number, factors)


def test_the_mean_is_over_clients_whether_they_come_alone_or_summed() -> None:
    alone = [reply(n) for n in (1, 2, 3)]
    found = mean(PSI, alone)
    for name in PSI:
        wanted = torch.stack([r.whole_delta()[name] for r in alone]).mean(0)
        assert torch.allclose(found.delta[name], wanted)
    assert (float(found.loss), found.padding) == (2.0, 0.5)
    summed = mean(PSI, [total(alone[:2]), total(alone[2:])])
    assert all(torch.allclose(summed.delta[n], found.delta[n]) for n in PSI)
    assert summed[1:] == found[1:]


def test_a_matrix_may_come_as_factors_from_some_and_whole_from_others() -> None:
    replies = [reply(n) for n in (1, 2, 3)]
    whole = [replace(r, delta=r.whole_delta(), factors={}) for r in replies]
    wanted = total(whole).delta
    for mixed in ([replies[0], whole[1], replies[2]], [whole[0], replies[1], whole[2]]):
        found = total(mixed).delta
        assert all(torch.allclose(found[n], wanted[n]) for n in PSI)


def test_replies_themselves_are_left_as_they_came() -> None:
    replies = [reply(n) for n in (1, 2, 3)]
    before = [r.delta["b"].clone() for r in replies]
    total(replies)
    assert all(torch.equal(r.delta["b"], b) for r, b in zip(replies, before, strict=True))


def test_another_aggregation_takes_the_place_of_the_mean() -> None:
    def median(psi: Params, replies: Iterable[Reply]) -> Update:
        each = list(one_by_one(replies))
        deltas = [reply.whole_delta() for reply in each]
        middle = {n: torch.stack([d[n] for d in deltas]).median(0).values for n in psi}
        return Update(middle, torch.stack([reply.loss for reply in each]).median(), 0.0)

    m, server = method("flowdup"), ServerConfig(1, 5, optimizer=OptimizerConfig("sgd", 1.0))
    state = initial_state(server, m, STREAM, torch.device("cpu"), torch.float32)
    moved = []
    for aggregate in (mean, median):
        runner = engine("sequential", m, "float32", ClientConfig(batch_size=10))
        (done,) = train(server, m, runner, state, STREAM, aggregate)
        moved.append(done.state.psi)
    assert any(not torch.equal(moved[0][n], moved[1][n]) for n in state.psi)
    with pytest.raises(ConfigError, match="to 'sequential'"):
        list(
            train(server, m, engine("batched", m, "float32", ClientConfig()), state, STREAM, median)
        )
