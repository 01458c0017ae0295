import pytest
import torch
from small import METHODS, STREAM, client, engine, method
from torch import Tensor

from flowdup.client import ClientConfig
from flowdup.data import ClientData
from flowdup.engines import Engine
from flowdup.errors import DataError
from flowdup.evaluation import evaluate, mean_accuracy, transductive_accuracy
from flowdup.methods import Params


class Memory:
    """A method that remembers what it was shown: class 1 for these inputs, class 0 for others."""

    learns_unlabeled, fingerprint = False, ""

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Params:
        return {"x": x, "present": present}

    def f(self, weights: Params, query: Tensor) -> Tensor:
        same = (query[:, None] == weights["x"][None]).flatten(2).all(2)  # [queries, shown]
        seen = (same & (weights["present"] > 0)).any(1)
        return torch.stack([~seen, seen], 1).float()


ENGINES = {
    kind: engine(kind, Memory(), "float32", ClientConfig())  # type: ignore[arg-type]
    for kind in ("sequential", "batched")
}


def labeled(points: int, label: int = 1) -> ClientData:
    return ClientData(client(3, points).x, torch.full((points,), label))


@pytest.mark.parametrize("runner", ENGINES.values(), ids=ENGINES)
def test_held_out_points_never_meet_the_points_that_generate(runner: Engine) -> None:
    scores = evaluate(runner, {}, [labeled(9), labeled(4)], STREAM)
    assert [s.transductive for s in scores] == [100.0, 100.0]
    assert [s.held_out for s in scores] == [0.0, 0.0]


def test_unlabeled_points_and_clients_are_not_scored() -> None:
    half = labeled(10)
    assert half.y is not None
    partly = ClientData(half.x, torch.where(torch.arange(10) < 4, half.y, -1))
    clients = [partly, labeled(10, 0), half.unlabeled()]
    scores = evaluate(ENGINES["batched"], {}, clients, STREAM)
    assert [s.transductive for s in scores] == [100.0, 0.0, None]
    assert mean_accuracy(scores)["transductive"] == 50.0


def test_a_client_of_one_point_has_no_held_out_half() -> None:
    (score,) = evaluate(ENGINES["batched"], {}, [labeled(1)], STREAM)
    assert score.transductive == 100.0 and score.held_out is None
    assert mean_accuracy([score])["held_out"] is None


def test_clients_without_labels_cannot_be_evaluated() -> None:
    with pytest.raises(DataError, match="no client to evaluate has labels"):
        evaluate(ENGINES["batched"], {}, [labeled(3).unlabeled()], STREAM)


@pytest.mark.parametrize("name", METHODS)
def test_accuracy_is_the_share_of_points_that_a_clients_own_model_gets_right(name: str) -> None:
    m = method(name)
    params = m.init(STREAM)
    clients = [client(i, n) for i, n in enumerate((7, 20))]
    by_hand = []
    for c in clients:
        logits = m.f(m.personalize(params, c.x, torch.ones(len(c))), c.x)
        assert c.y is not None
        by_hand.append(float((logits.argmax(1) == c.y).float().mean()) * 100)
    found = transductive_accuracy(engine("batched", m, "float32", ClientConfig()), params, clients)
    assert found == pytest.approx(sum(by_hand) / 2)
