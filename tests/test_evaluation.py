import math

import pytest
import torch
from small import METHODS, STREAM, client, engine, method

from flowdup.client import ClientConfig
from flowdup.data import ClientData
from flowdup.engines import Question
from flowdup.errors import DataError
from flowdup.evaluation import evaluate, mean_accuracy, transductive_accuracy


class Recorder:
    """Answers with the class that `y` would have if it were the pixel sum; keeps the questions."""

    def __init__(self) -> None:
        self.asked: list[Question] = []

    def train(self, *_: object) -> None: ...

    def predict(self, params: object, questions: list[Question]) -> list[torch.Tensor]:
        self.asked += questions
        return [q.query.flatten(1).long().sum(1) % 4 for q in questions]


def labeled(points: int) -> ClientData:
    x = client(3, points).x
    return ClientData(x, x.flatten(1).long().sum(1) % 4)


def test_held_out_points_never_meet_the_points_that_generate() -> None:
    recorder = Recorder()
    (score,) = evaluate(recorder, {}, [labeled(9)], STREAM)  # type: ignore[arg-type]
    whole, halves = recorder.asked
    assert (whole.x == whole.query).all()
    first, second = ({x.numpy().tobytes() for x in part} for part in halves)
    assert len(first) == 5 and len(second) == 4 and not first & second
    assert score.transductive == score.held_out == 100.0


def test_unlabeled_points_and_clients_are_not_scored() -> None:
    half = labeled(10)
    assert half.y is not None
    partly = ClientData(half.x, torch.where(torch.arange(10) < 4, half.y, -1))
    wrong = ClientData(half.x, (half.y + 1) % 4)
    none = half.unlabeled()
    scores = evaluate(Recorder(), {}, [partly, wrong, none], STREAM)  # type: ignore[arg-type]
    assert [s.transductive for s in scores] == [100.0, 0.0, None]
    assert mean_accuracy(scores)["transductive"] == 50.0


def test_a_client_of_one_point_has_no_held_out_half() -> None:
    (score,) = evaluate(Recorder(), {}, [labeled(1)], STREAM)  # type: ignore[arg-type]
    assert score.transductive == 100.0 and score.held_out is None
    assert math.isnan(mean_accuracy([score])["held_out"])


def test_clients_without_labels_cannot_be_evaluated() -> None:
    with pytest.raises(DataError, match="no client to evaluate has labels"):
        evaluate(Recorder(), {}, [labeled(3).unlabeled()], STREAM)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
def test_accuracy_is_the_share_of_points_that_a_clients_own_model_gets_right(name: str) -> None:
    m = method(name)
    params = m.init(STREAM)
    clients = [client(i, n) for i, n in enumerate((7, 20))]
    by_hand = []
    for c in clients:
        logits = m.f(m.personalize(params, c.x, torch.ones(len(c))), c.x)
        by_hand.append(float((logits.argmax(1) == c.y).float().mean()) * 100)
    found = transductive_accuracy(engine("batched", m, "float32", ClientConfig()), params, clients)
    assert found == pytest.approx(sum(by_hand) / 2)
