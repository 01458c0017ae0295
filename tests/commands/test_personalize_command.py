"""`flowdup personalize` says whether a client's data look like those of training clients."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands.here import Ended
from commands.here import flowdup as command

import flowdup
from flowdup.data import load_population
from flowdup.random import Stream

SMALL = [
    "data.train_clients=40",
    "data.validation_clients=40",
    "data.test_clients=3",
    "server.rounds=5",
    "server.cohort=5",
    "engine.device=cpu",
]


def train(out: Path, *settings: str) -> Path:
    for _ in flowdup.train_run(flowdup.load_config("digits", [*SMALL, *settings]), out):
        pass
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("personalize") / "run")


@pytest.fixture
def files(run: Path, tmp_path: Path) -> dict[str, Path]:
    """Inputs of a client like those of training, and of one that is not."""
    config = flowdup.load_config("digits", SMALL)
    x = load_population(config.data, Stream(config.seed).child("data")).train[0].x.numpy()
    found = {}
    for name, inputs in {"known": x, "foreign": 255 - x}.items():
        found[name] = tmp_path / f"{name}.npz"
        np.savez(found[name], x=inputs)
    return found


def personalize(run: Path, source: Path, *words: str) -> Ended:
    return command("personalize", run, "--input", source, "--out", source.parent / "me", *words)


def told(ended: Ended) -> Any:
    assert ended.code == 0, ended.error
    return json.loads(ended.out)


def test_a_client_like_those_of_training_is_told_its_score(
    run: Path, files: dict[str, Path]
) -> None:
    ended = personalize(run / "best", files["known"])
    assert ended.code == 0 and not ended.error
    assert "made from 40 unlabeled points; the data are like training clients': score" in ended.out
    assert "at 5 % false alarms" in ended.out
    for choice in ("warn", "global", "refuse"):
        found = told(personalize(run, files["known"], "--json", "--foreign", choice))
        assert found["made"] == "personal" and found["points"] == 40
        assert found["familiarity"]["score"] <= found["familiarity"]["threshold"]
        assert found["familiarity"]["foreign"] is False


def test_a_foreign_client_is_warned(run: Path, files: dict[str, Path], tmp_path: Path) -> None:
    ended = personalize(run, files["foreign"])
    assert "the data are foreign: score" in ended.out
    assert ended.error.startswith("warning: these data look like those of no training client (")
    found = told(personalize(run, files["foreign"], "--json"))
    assert found["made"] == "personal"
    assert found["familiarity"]["score"] > found["familiarity"]["threshold"]
    x = np.load(files["foreign"])["x"]
    own = flowdup.load(run).personalize(x)
    assert own.logits(x).equal(flowdup.load_model(tmp_path / "me").logits(x))


def test_a_foreign_client_gets_the_global_model_by_choice(
    run: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    ended = personalize(run, files["foreign"], "--foreign", "global")
    assert "me: the global model; the data are foreign" in ended.out and not ended.error
    assert told(personalize(run, files["foreign"], "--foreign", "global", "--json"))["made"] == (
        "global"
    )
    x = np.load(files["foreign"])["x"]
    for_all = flowdup.load(run).global_model()
    assert for_all.logits(x).equal(flowdup.load_model(tmp_path / "me").logits(x))


def test_prediction_sets_of_the_global_model_are_refused(
    files: dict[str, Path], tmp_path: Path
) -> None:
    certified = train(tmp_path / "run", "data.certify_clients=20")
    flowdup.certify_run(certified, ["prediction-sets"])
    foreign = files["foreign"]
    words = ("predict", tmp_path / "me", "--input", foreign, "--set", "0.9")
    assert personalize(certified, foreign).code == 0 and command(*words).code == 0
    assert personalize(certified, foreign, "--foreign", "global").code == 0
    ended = command(*words)
    assert ended.code == 2 and "this is the global model" in ended.error
    assert "flowdup certify" not in ended.error
    assert command(*words[:-2]).code == 0


def test_a_foreign_client_is_refused_by_choice(
    run: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    ended = personalize(run, files["foreign"], "--foreign", "refuse")
    assert ended.code == 3
    assert "these data look like those of no training client" in ended.error
    assert not (tmp_path / "me").exists()
    assert (
        "warn, global, refuse, not 'hope'"
        in personalize(run, files["known"], "--foreign", "hope").error
    )


def test_where_nothing_tells_a_model_is_made_unless_safety_was_asked_for(
    files: dict[str, Path], tmp_path: Path
) -> None:
    few = train(tmp_path / "few", "data.validation_clients=18", "data.points=10")
    ended = personalize(few, files["foreign"])
    assert "is not known: the run has stored nothing to tell by" in ended.out and not ended.error
    assert told(personalize(few, files["foreign"], "--json"))["familiarity"] is None
    for choice in ("global", "refuse"):
        asked = personalize(few, files["foreign"], "--foreign", choice)
        assert asked.code == 2 and "nothing is stored of this federation" in asked.error
    other = train(tmp_path / "fedavg", "method.name=fedavg")
    assert "is not known: its method cannot tell" in personalize(other, files["known"]).out
