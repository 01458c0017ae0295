"""Runs that a CPU trains in minutes: small networks and few rounds, on the clients of presets.

They show how something depends on something, not how good a method is.  In full, a preset is
trained as it is, on a GPU.
"""

from dataclasses import dataclass
from pathlib import Path

from flowdup.config import load_config
from flowdup.run import RunFolder, train_run

_NETWORK = ("model=cnn-small", "method.subspace.k=1000", "client.optimizer.lr=0.1")
_ROUNDS = ("server.rounds=120", "server.cohort=30", "run.evaluate_every=40")


@dataclass(frozen=True)
class SmallRun:
    """A preset, and what is changed in it."""

    preset: str
    data: str  # its name for people
    settings: tuple[str, ...]

    def train(self, runs: Path, seed: int = 0, full: bool = False) -> Path:
        """The run's folder; training goes on where it was stopped, if at all."""
        folder = runs / f"{self.preset}-{seed}{'-full' if full else ''}"
        device = "auto" if full else "cpu"
        texts = [*(() if full else self.settings), f"seed={seed}", f"engine.device={device}"]
        config = load_config(self.preset, texts)
        for metrics in train_run(config, folder, resume=RunFolder(folder).started):
            if "validation_accuracy" in metrics:
                print(folder.name, metrics, flush=True)
        return folder


_BEFORE = (  # FedAvg first: with few rounds h learns nothing of natural images by itself
    'before=[{method={name="fedavg-pseudo", correction="em", init_scale=0.41}, '
    "server={rounds=100, alpha=0.5, warm_up=0, lr_decay_fraction=0.0}}]",
)
_ROTATED = ("data.train_clients=500", "data.validation_clients=100", *_NETWORK, *_ROUNDS)
RUNS = {
    run.preset: run
    for run in (
        SmallRun("digits", "digits", ("server.rounds=300",)),
        SmallRun("rotated-mnist", "rotated MNIST", _ROTATED),
        SmallRun("rotated-fashion-mnist", "rotated Fashion-MNIST", _ROTATED),
        SmallRun(
            "class-partitioned-cifar10-plus",
            "CIFAR-10, two classes",
            (*_NETWORK, *_ROUNDS, "server.rounds=40", *_BEFORE),
        ),
        SmallRun(
            "femnist",
            "FEMNIST",
            (*_NETWORK, *_ROUNDS, "server.rounds=80", "server.cohort=10", "data.test_clients=100"),
        ),
    )
}
