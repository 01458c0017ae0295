import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from small import METHODS, SPEC, STREAM, client, engine, method, population
from torch import Tensor

import flowdup
from flowdup.client import ClientConfig
from flowdup.data import ClientData
from flowdup.engines import Engine, Roster, SupportQuery
from flowdup.errors import ConfigError, DataError
from flowdup.evaluation import (
    READINGS,
    Summary,
    evaluate,
    evaluate_by_support,
    metrics_table,
    summarize,
    transductive_accuracy,
)
from flowdup.messages import Reply, Task
from flowdup.methods import Method, Params
from flowdup.methods.base import Batch
from flowdup.metrics import METRICS, calibration_error, macro_f1, nll
from flowdup.random import Stream


class Memory(Method):
    """A method that remembers what it was shown: class 1 for these inputs, class 0 for others."""

    def __init__(self) -> None:
        self.f = Recognition()  # type: ignore[assignment]

    def init(self, stream: Stream) -> Params:
        return {}

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return torch.zeros(())

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Params:
        return {"x": x, "present": present}


class Recognition:
    inputs = SPEC.shape

    def __call__(self, weights: Params, query: Tensor) -> Tensor:
        same = (query[:, None] == weights["x"][None]).flatten(2).all(2)  # [queries, shown]
        seen = (same & (weights["present"] > 0)).any(1)
        return torch.stack([~seen, seen], 1).float()


ENGINES = {
    kind: engine(kind, Memory(), "float32", ClientConfig()) for kind in ("sequential", "batched")
}


def labeled(points: int, label: int = 1) -> ClientData:
    return ClientData(client(3, points).x, torch.full((points,), label))


@pytest.mark.parametrize("runner", ENGINES.values(), ids=ENGINES)
def test_held_out_points_never_meet_the_points_that_generate(runner: Engine) -> None:
    scores = evaluate(runner, {}, [labeled(9), labeled(4)], STREAM)
    assert [s.metrics["transductive"]["accuracy"] for s in scores] == [100.0, 100.0]
    assert [s.metrics["held_out"]["accuracy"] for s in scores] == [0.0, 0.0]


def test_unlabeled_points_and_clients_are_not_scored() -> None:
    half = labeled(10)
    assert half.y is not None
    partly = ClientData(half.x, torch.where(torch.arange(10) < 4, half.y, -1))
    clients = [partly, labeled(10, 0), half.unlabeled()]
    scores = evaluate(ENGINES["batched"], {}, clients, STREAM)
    found = [s.metrics["transductive"].get("accuracy") for s in scores]
    assert found == [100.0, 0.0, None]
    assert metrics_table(scores)["transductive"]["accuracy"].mean == 50.0


def test_clients_without_labels_do_not_count_in_an_accuracy() -> None:
    clients = [labeled(10), labeled(6).unlabeled(), labeled(10)]
    found = transductive_accuracy(ENGINES["batched"], {}, clients)
    assert (found.mean, found.worst) == (100.0, 100.0)


class Asked:
    """An engine that keeps what it is asked and answers with zeros."""

    roster = Roster(range(0), range(0))

    def __init__(self) -> None:
        self.pairs: list[SupportQuery] = []

    def train(self, task: Task) -> Iterator[Reply]:
        raise NotImplementedError

    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
        self.pairs = list(pairs)
        return [torch.zeros(len(pair.query), 2) for pair in pairs]


def test_held_out_halves_are_random_and_a_clients_own() -> None:
    """Points often lie in some order, by class or by time: a half of it would be another task."""
    runner, points = Asked(), torch.arange(40).reshape(20, 2)
    evaluate(runner, {}, [ClientData(points, torch.zeros(20).long())] * 2, STREAM)
    halves = [{tuple(row) for row in pair.support.tolist()} for pair in runner.pairs]
    for pair, half in zip(runner.pairs, halves, strict=True):
        rest = {tuple(row) for row in pair.query.tolist()}
        assert len(half) == len(rest) == 10 and not half & rest
        assert half != {tuple(row) for row in points[:10].tolist()} != rest
    assert halves[0] != halves[1]


def test_all_points_make_a_model_in_a_mixed_order_and_are_scored_in_their_own() -> None:
    """A client may store its points class by class, and batches of one class are another task."""
    runner, points = Asked(), torch.arange(40).reshape(20, 2)
    transductive_accuracy(runner, {}, [ClientData(points, torch.arange(20) // 10)] * 2)
    for pair in runner.pairs:
        assert torch.equal(pair.query, points) and not torch.equal(pair.support, points)
        assert torch.equal(pair.support.sort(0).values, points)
        assert 2 < int((pair.support[:10, 0] < 20).sum()) < 8  # of the first class


def test_against_the_size_of_the_support_nothing_else_differs() -> None:
    """Larger supports hold the smaller ones, and the scored points are those of held-out."""
    points = torch.arange(80).reshape(40, 2)
    clients = [ClientData(points, torch.zeros(40).long())] * 2
    runner, shown, scored = Asked(), [], []
    for size in (1, 7, 20):
        evaluate_by_support(runner, {}, clients, STREAM, [size])
        shown.append([pair.support.tolist() for pair in runner.pairs])
        scored.append([pair.query.tolist() for pair in runner.pairs])
    evaluate(runner, {}, clients, STREAM)
    assert [len(own) for own in shown[0] + shown[1]] == [1, 1, 7, 7]
    for i, pair in enumerate(runner.pairs):
        assert shown[0][i] == shown[1][i][:1] and shown[1][i] == shown[2][i][:7]
        assert shown[2][i] == pair.support.tolist()
        assert scored[0][i] == scored[1][i] == scored[2][i] == pair.query.tolist()


@pytest.mark.parametrize("kind", ["sequential", "batched"])
def test_a_support_of_the_whole_half_is_the_held_out_reading(kind: str) -> None:
    m = method("flowdup")
    params, clients = m.init(STREAM), [client(i, 20) for i in range(4)]
    runner = engine(kind, m, "float32", ClientConfig(batch_size=10))
    one, whole = evaluate_by_support(runner, params, clients, STREAM, [1, 10])
    held_out = metrics_table(evaluate(runner, params, clients, STREAM))["held_out"]
    assert whole.metrics == held_out != one.metrics
    assert (one.points, one.clients, whole.points, whole.clients) == (1, 4, 10, 4)


def test_only_clients_with_enough_points_for_the_largest_support_take_part() -> None:
    clients = [labeled(20), labeled(9), labeled(19), labeled(18), labeled(20).unlabeled()]
    rows = evaluate_by_support(ENGINES["batched"], {}, clients, STREAM, [2, 10])
    assert [(row.points, row.clients) for row in rows] == [(2, 2), (10, 2)]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([1, 11], "has 11 points to make a model from.* ask for 10 at most"),
        ([0], "at least 1 point"),
        ([-1, 2], "at least 1 point"),
        ([2.5], "at least 1 point"),
    ],
)
def test_supports_that_nobody_has_are_refused(sizes: list[int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        evaluate_by_support(ENGINES["batched"], {}, [labeled(20)], STREAM, sizes)


def test_a_client_of_one_point_has_no_held_out_half() -> None:
    (score,) = evaluate(ENGINES["batched"], {}, [labeled(1)], STREAM)
    assert score.metrics["transductive"]["accuracy"] == 100.0 and score.metrics["held_out"] == {}
    assert metrics_table([score])["held_out"]["accuracy"] == Summary(None, None, None, None)


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
    runner = engine("batched", m, "float32", ClientConfig(batch_size=10))
    found = transductive_accuracy(runner, params, clients)
    assert found.mean == pytest.approx(sum(by_hand) / 2)
    assert found.worst_decile == pytest.approx(min(by_hand))


def some(points: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits that are right more often than by chance, and labels; some classes never occur."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, max(1, classes - 2), points)
    logits = draw.normal(size=(points, classes)) + 2 * np.eye(classes)[y]
    return torch.from_numpy(logits), torch.from_numpy(y)


def test_negative_log_likelihood_is_that_of_the_labels() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]]).double()
    by_hand = (math.log(2) - math.log(3 / 4)) / 2
    assert nll(logits, torch.tensor([1, 0])) == pytest.approx(by_hand)


def test_a_model_that_gives_nan_is_infinitely_unlikely() -> None:
    assert nll(torch.full((2, 3), math.nan), torch.tensor([0, 1])) == math.inf


def test_calibration_error_is_the_gap_between_confidence_and_accuracy_bin_by_bin() -> None:
    """0.61, right, and 0.65, wrong, in one bin; 0.9, right and wrong, in another; 1.0, right."""
    confidence = torch.tensor([0.61, 0.65, 0.9, 0.9, 1.0], dtype=torch.float64)
    logits = torch.stack([confidence, 1 - confidence], 1).log()
    y = torch.tensor([0, 1, 0, 1, 0])
    bins = [abs(0.5 - 0.63) * 2, abs(0.5 - 0.9) * 2, abs(1.0 - 1.0)]
    assert calibration_error(logits, y) == pytest.approx(100 * sum(bins) / 5)


@pytest.mark.parametrize(
    ("confidence", "gap"), [(0.8 - 1e-6, abs(1 - 0.75 - 0.8)), (0.8 + 1e-6, 0.25 + 0.8)]
)
def test_bins_are_fifteen_of_equal_width(confidence: float, gap: float) -> None:
    """A bin ends at 12/15 = 0.8: below it, a wrong answer shares the bin of a right one at 0.75."""
    sure = torch.tensor([0.75, confidence], dtype=torch.float64)
    logits = torch.stack([sure, 1 - sure], 1).log()
    found = calibration_error(logits, torch.tensor([0, 1]))
    assert found == pytest.approx(100 * gap / 2, abs=1e-3)


def test_calibration_error_of_many_points_is_that_of_bins_made_by_numpy() -> None:
    logits, y = some(500, 6, 0)
    p = logits.softmax(1).numpy()
    sure, right = p.max(1), p.argmax(1) == y.numpy()
    which = np.digitize(sure, np.arange(1, 15) / 15, right=True)
    by_hand = sum(abs((right[which == b] - sure[which == b]).sum()) for b in range(15)) / 500
    assert calibration_error(logits, y) == pytest.approx(100 * by_hand)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("points", "classes"), [(1, 3), (12, 4), (200, 10)])
def test_macro_f1_is_scikit_learns(points: int, classes: int, seed: int) -> None:
    logits, y = some(points, classes, seed)
    theirs = f1_score(y.numpy(), logits.argmax(1).numpy(), average="macro")
    assert macro_f1(logits, y) == pytest.approx(100 * theirs)


def test_over_clients_the_worst_are_those_who_fare_worst() -> None:
    """25 clients: three of them are the worst tenth, rounded up."""
    values = [float(v) for v in range(25)]
    up, down = summarize(values), summarize(values, higher_is_better=False)
    assert (up.mean, up.worst_decile, up.worst) == (12.0, 1.0, 0.0)
    assert (down.mean, down.worst_decile, down.worst) == (12.0, 23.0, 24.0)
    assert up.std == down.std == pytest.approx(math.sqrt(52))


@pytest.mark.parametrize(("clients", "tenth"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_worst_decile_is_a_tenth_rounded_up(clients: int, tenth: int) -> None:
    values = [float(v) for v in range(clients)]
    assert summarize(values).worst_decile == pytest.approx(sum(values[:tenth]) / tenth)


def test_an_infinite_value_makes_the_worst_infinite_and_hides_no_client() -> None:
    found = summarize([1.0, math.inf], higher_is_better=False)
    assert found.mean == found.worst == found.worst_decile == math.inf


def test_every_metric_of_the_table_is_one_number_per_client_and_reading() -> None:
    m = method("fedavg")
    runner = engine("batched", m, "float32", ClientConfig(batch_size=10))
    clients = [client(i, 20) for i in range(4)]
    scores = evaluate(runner, m.init(STREAM), clients, STREAM)
    assert all(set(s.metrics[reading]) == set(METRICS) for s in scores for reading in READINGS)
    by_hand = np.mean([s.metrics["held_out"]["nll"] for s in scores])
    assert metrics_table(scores)["held_out"]["nll"].mean == pytest.approx(by_hand)


@pytest.fixture
def own_metric() -> Iterator[str]:
    def top_class(logits: Tensor, y: Tensor) -> float:
        """Not defined for clients whose first label is 0."""
        return math.nan if int(y[0]) == 0 else float(logits.shape[1])

    flowdup.register_metric("width", top_class, higher_is_better=False)
    yield "width"
    METRICS.unregister("width")


def test_ones_own_metric_is_in_every_evaluation(own_metric: str, tmp_path: Path) -> None:
    config = flowdup.read_config(
        {"model": "mlp", "method": METHODS["fedavg"], "server": {"rounds": 1, "cohort": 2}}
    )
    list(flowdup.train_run(config, tmp_path, population=population()))
    flowdup.evaluate_run(tmp_path, population())
    found = json.loads((tmp_path / "evaluation.json").read_text())
    table = found["metrics"]["transductive"]
    assert set(table) == {"accuracy", "nll", "calibration_error", "macro_f1", own_metric}
    assert table[own_metric] == {"mean": 4.0, "std": 0.0, "worst_decile": 4.0, "worst": 4.0}
    told = [own_metric in c["metrics"]["transductive"] for c in found["clients"]]
    test = population().test
    assert told == [bool(c.y is not None and int(c.y[0]) != 0) for c in test] and any(told)
    assert own_metric in (tmp_path / "report.html").read_text()


def test_a_metrics_name_is_a_word_and_taken_once() -> None:
    with pytest.raises(ConfigError, match="exists already"):
        flowdup.register_metric("accuracy", nll)
    with pytest.raises(ConfigError, match="small letters"):
        flowdup.register_metric("Top 5", nll)


def test_numbers_that_json_cannot_say_are_null(tmp_path: Path) -> None:
    flowdup.register_metric("endless", lambda logits, y: math.inf)
    try:
        config = flowdup.read_config(
            {"model": "mlp", "method": METHODS["fedavg"], "server": {"rounds": 1, "cohort": 2}}
        )
        list(flowdup.train_run(config, tmp_path, population=population()))
        flowdup.evaluate_run(tmp_path, population())
    finally:
        METRICS.unregister("endless")

    def refuse(word: str) -> None:
        raise AssertionError(word)

    content = (tmp_path / "evaluation.json").read_text()
    found = json.loads(content, parse_constant=refuse)
    assert found["metrics"]["held_out"]["endless"]["mean"] is None
