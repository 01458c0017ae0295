"""A finished run stores what tells foreign clients, beside the checkpoint that counts."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flowdup
from flowdup.data import load_population
from flowdup.errors import FlowdupError
from flowdup.familiarity import FAMILIARITY
from flowdup.random import Stream
from flowdup.run import RunFolder

SMALL = [
    "data.train_clients=100",
    "data.validation_clients=100",
    "data.test_clients=100",
    "server.rounds=20",
    "server.cohort=10",
    "engine.device=cpu",
    "run.evaluate_every=10",
]


def train(out: Path, *settings: str, stop: bool = False) -> list[dict[str, Any]]:
    config = flowdup.load_config("digits", [*SMALL, *settings])
    rounds = flowdup.train_run(config, out, resume=True, stop=(lambda: True) if stop else None)
    return list(rounds)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("foreign") / "run"
    train(out)
    return out


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(whole, tmp_path / "run")
    return RunFolder(tmp_path / "run")


@pytest.fixture(scope="module")
def unseen(whole: Path) -> list[Tensor]:
    """The inputs of test clients, in random order."""
    config, draw = RunFolder(whole).read_config(), torch.Generator().manual_seed(1)
    clients = load_population(config.data, Stream(config.seed).child("data")).test
    return [c.x[torch.randperm(len(c), generator=draw)] for c in clients]


def alarms(run: Path, clients: list[Tensor]) -> float:
    federation = flowdup.load(run)
    return sum(federation.familiarity(x).foreign for x in clients) / len(clients)


def test_noise_and_inverted_images_are_foreign_and_unseen_clients_are_not(
    whole: Path, unseen: list[Tensor]
) -> None:
    draw = torch.Generator().manual_seed(0)
    noise = [torch.randint(0, 256, x.shape, generator=draw).to(torch.uint8) for x in unseen]
    assert alarms(whole, noise) >= 0.95
    assert alarms(whole, [255 - x for x in unseen]) >= 0.95
    assert alarms(whole, [255 - x[:5] for x in unseen]) >= 0.95
    for points in (1, 5, 40):  # two binomial deviations of 100 clients, and that of the limit
        assert alarms(whole, [x[:points] for x in unseen]) < 0.05 + 0.09


def test_the_folder_of_the_best_round_is_all_that_a_client_needs(
    run: RunFolder, unseen: list[Tensor], tmp_path: Path
) -> None:
    verdict = flowdup.load(run.path).familiarity(unseen[0])
    assert verdict == flowdup.load(run.best.rename(tmp_path / "sent")).familiarity(unseen[0])
    assert verdict.rate == 0.05


def test_a_federation_that_is_sent_to_a_worker_still_tells(
    whole: Path, unseen: list[Tensor]
) -> None:
    federation = flowdup.load(whole)
    copy: flowdup.Federation = pickle.loads(pickle.dumps(federation))
    assert copy.familiarity(unseen[0]) == federation.familiarity(unseen[0])


def test_a_run_that_was_killed_before_it_was_stored_stores_it_when_resumed(run: RunFolder) -> None:
    path = run.best / FAMILIARITY
    content = path.read_bytes()
    path.unlink()
    assert train(run.path) == []  # nothing is left to train
    assert path.read_bytes() == content


def test_a_run_that_was_stopped_stores_nothing_until_it_ends(whole: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", stop=True)
    assert not list(tmp_path.rglob(FAMILIARITY))
    train(tmp_path / "run")
    stored = (tmp_path / "run" / "best" / FAMILIARITY).read_bytes()
    assert stored == (whole / "best" / FAMILIARITY).read_bytes()


def test_limits_of_a_round_that_no_longer_counts_are_not_believed(
    run: RunFolder, unseen: list[Tensor]
) -> None:
    train(run.path, "run.keep='last'")
    assert not run.best.exists()
    assert flowdup.load(run.path).familiarity(unseen[0]).threshold > 0
    shutil.copy(run.checkpoint / FAMILIARITY, run.path)
    other = run.path.parent / "other"
    train(other, "run.keep='last'", "seed=1", "server.rounds=1")
    shutil.copy(run.path / FAMILIARITY, other / "checkpoint")
    with pytest.raises(FlowdupError, match="nothing is stored of this federation"):
        flowdup.load(other).familiarity(unseen[0])


def test_another_rate_has_limits_of_its_own(run: RunFolder, unseen: list[Tensor]) -> None:
    before = flowdup.load(run.path).familiarity(unseen[0])
    train(run.path, "run.false_alarms=0.2")
    after = flowdup.load(run.path).familiarity(unseen[0])
    assert after.rate == 0.2
    assert after.score == before.score and after.threshold < before.threshold


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            ["data.validation_clients=18", "data.points=10"],
            "takes 10 training clients and 19 validation clients",
        ),
        (["data.train_clients=9", "data.points=4"], "there are 9 and 100"),
        (["method.name=fedavg"], "method 'fedavg' has no embedding of clients"),
        (
            [
                "server.privacy.noise=1.0",
                "server.aggregation.norm_bound=1.0",
                "server.replacement=false",
            ],
            "without noise",
        ),
        (["run.false_alarms=0.0"], ""),
    ],
)
def test_where_foreign_clients_cannot_be_told_the_log_says_why(
    settings: list[str],
    why: str,
    unseen: list[Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "flowdup"):
        train(tmp_path / "run", "server.rounds=1", *settings)
    assert not list(tmp_path.rglob(FAMILIARITY))
    told = [m for m in caplog.messages if m.startswith("foreign clients will not be told")]
    assert len(told) == bool(why) and why in "".join(told)
    federation = flowdup.load(tmp_path / "run")
    assert federation.summary is None
    with pytest.raises(FlowdupError, match=r"nothing is stored|no embedding"):
        federation.familiarity(unseen[0])


def test_lazy_clients_and_stages_are_told_apart_as_well(
    unseen: list[Tensor], tmp_path: Path
) -> None:
    stage = 'before=[{"method"={"name"="fedavg"}, "server"={"rounds"=1}}]'
    lazy = ["data.lazy=true", "data.train_clients=1000000", "server.rounds=2"]
    train(tmp_path / "run", stage, *lazy)
    assert alarms(tmp_path / "run", [255 - x for x in unseen]) >= 0.95


def test_a_method_without_a_model_for_everyone_says_so(tmp_path: Path) -> None:
    train(tmp_path / "run", "server.rounds=1", "method.name=pefll")
    with pytest.raises(FlowdupError, match="'pefll' learns no model for everyone: take the client"):
        flowdup.load(tmp_path / "run").global_model()


def test_the_global_model_is_what_the_method_holds_for_everyone(
    whole: Path, unseen: list[Tensor]
) -> None:
    federation = flowdup.load(whole)
    model, weights = federation.global_model(), federation.method.global_model(federation.psi)
    assert all(torch.equal(p, weights[n]) for n, p in model.module.named_parameters())
    assert model.sets is None
    assert not torch.equal(
        model.logits(unseen[0]), federation.personalize(unseen[0]).logits(unseen[0])
    )
