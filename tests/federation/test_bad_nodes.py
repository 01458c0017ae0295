"""One bad node of six, with the settings that docs/howto/privacy.md names."""

import json
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from nearby import NearbyFederation
from safetensors.torch import load, save

from flowdup.checkpoint import load_checkpoint
from flowdup.evaluation import accuracy_summary, transductive_logits
from flowdup.federation.record import NodeRecord
from flowdup.run.simulation import Simulation

NODES = tuple(f"hospital-{number}" for number in range(1, 7))
PAGE = Path(__file__).parents[2] / "docs/howto/privacy.md"
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "clipped": {"norm_bound": 0.2},
    "trimmed": {"name": "trimmed-mean"},
}
Attack = Callable[[torch.Tensor], torch.Tensor]
ATTACKS: dict[str, list[Attack]] = {  # by round, the last from then on
    "none": [lambda delta: delta],
    "misfits": [
        lambda delta: torch.full_like(delta, 1e30),
        lambda delta: torch.full_like(delta, torch.nan),
        lambda delta: torch.zeros(7),
    ],
    "flipped": [lambda delta: -100 * delta],
}


def attacked(content: bytes, attack: Attack) -> bytes:
    """A reply whose update is another one."""
    about = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    tensors = {n: attack(t) if n.startswith("delta/") else t for n, t in load(content).items()}
    return bytes(save(tensors, about))


@cache
def accuracy(aggregation: str, attack: str) -> float:
    """Of test clients, in percent."""
    block = PAGE.read_text().split('toml title="six-nodes.toml"\n')[1].split("```")[0]
    table = tomllib.loads(block)
    table["server"]["aggregation"] = AGGREGATIONS[aggregation]
    with TemporaryDirectory() as root:
        near = NearbyFederation(Path(root), table, NODES, labeled=6)
        stubs, rounds = near.nodes(), list[str]()

        def change(name: str, answer: Any) -> Any:
            if name != "train":
                return answer
            rounds.append(name)
            turn = min(len(rounds), len(ATTACKS[attack])) - 1
            return {"replies": [attacked(c, ATTACKS[attack][turn]) for c in answer["replies"]]}

        stubs[2].change = change
        assert near.train(stubs, encoding="plain") == "finished"
        why = [row["reason"] for row in NodeRecord(near.folder).refusals(NODES[2])]
        state = load_checkpoint(near.run / "checkpoint")[1]
        simulation = Simulation(near.config, near.population)
    tested = near.population.test
    with simulation.cores():
        logits = transductive_logits(simulation.engine, state.deployed, tested)
    found = accuracy_summary(logits, tested).mean
    assert found is not None
    assert bool(why) == (attack == "misfits")
    words = zip(("norm", "NaN", "shape"), why, strict=bool(why))
    assert all(word in reason for word, reason in words)  # after these it is suspended
    return found


@pytest.mark.parametrize(
    ("aggregation", "attack"),
    [
        ("trimmed", "misfits"),
        ("trimmed", "flipped"),
        ("clipped", "flipped"),
    ],
)
def test_one_bad_node_of_six_moves_accuracy_by_less_than_a_point(
    aggregation: str, attack: str
) -> None:
    assert accuracy("mean", "none") > 90
    assert abs(accuracy(aggregation, attack) - accuracy("mean", "none")) < 1


def test_one_bad_node_of_six_ruins_the_plain_mean() -> None:
    """By an update that fits; one that does not is refused in any case."""
    assert accuracy("mean", "flipped") < 50
