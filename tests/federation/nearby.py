"""A federation whose nodes live in this process: FLARE's stand-ins for nodes, and nothing else, are
replaced, so that a run takes a second.  With real processes it is `LocalFederation`.
"""

import atexit
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from flowdup.config import Config, read_config
from flowdup.data import ClientData, Population, load_population
from flowdup.federation.calls import CallSettings
from flowdup.federation.coordinator import Coordinator, request_table
from flowdup.federation.folder import FederationFolder, FederationNames
from flowdup.federation.kit import Kit
from flowdup.federation.local import write_clients
from flowdup.federation.node import Node
from flowdup.federation.processes import KIT_VARIABLE, NodeSettings, write_node_settings
from flowdup.federation.provision import init_federation
from flowdup.federation.settings import FederationSettings
from flowdup.random import Stream
from flowdup.settings import plain

NODES = ("north", "south", "west")
TABLE: dict[str, Any] = {
    "model": "mlp",
    "data": {
        "source": "digits",
        "points": 20,
        "overlap": True,
        "train_clients": 9,
        "validation_clients": 3,
        "test_clients": 0,
    },
    "method": {
        "name": "flowdup",
        "subspace": {"kind": "hashed", "k": 300},
        "hypernetwork": {"hidden": 20},
    },
    "client": {"batch_size": 10, "clip": 0.0, "optimizer": {"lr": 0.03}},
    "server": {"rounds": 6, "cohort": 6, "alpha": 0.5},
    "run": {"evaluate_every": 3, "keep": "last"},
}


def population_of(config: Config, labeled: int = 4) -> Population:
    """The simulator's clients: those of the first node have labels, and one of the second."""
    found = load_population(config.data, Stream(config.seed).child("data"))
    train = [c if i < labeled else c.unlabeled() for i, c in enumerate(found.train)]
    return replace(found, train=train)


def write_data(root: Path, population: Population, nodes: Sequence[str] = NODES) -> None:
    each = len(population.train) // len(nodes)
    for number, node in enumerate(nodes):
        own = population.train[number * each : (number + 1) * each]
        write_clients(root / "data" / node / "train", own)
        held: Sequence[ClientData] = population.validation[number :: len(nodes)]
        if held:
            write_clients(root / "data" / node / "validation", held, "held")


@cache
def _provisioned(nodes: tuple[str, ...]) -> Path:
    """Certificates take a second: all tests of a process share them."""
    made = FederationFolder(Path(mkdtemp()) / "federation")
    init_federation(made, FederationNames("localhost", 8002, nodes))
    atexit.register(shutil.rmtree, made.path.parent)
    return made.path


class Stub:
    """What FLARE gives the coordinator for a node; `change` may spoil answers."""

    def __init__(self, name: str, node: Node) -> None:
        self.name, self.node = name, node
        self.change: Callable[[str, Any], Any] = lambda name, answer: answer
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __call__(self, timeout: float) -> "Stub":
        assert timeout > 0
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*arguments: Any) -> Any:
            answer = self.change(name, getattr(self.node, name)(*arguments))
            self.calls.append((name, arguments, answer))
            return answer

        return method


class NearbyFederation:
    """A folder with kits and data, and nodes made anew for every job."""

    def __init__(
        self,
        root: Path,
        table: dict[str, Any] | None = None,
        nodes: tuple[str, ...] = NODES,
        labeled: int = 4,
    ) -> None:
        self.root, self.config, self.names = root, read_config(table or TABLE), nodes
        self.folder = FederationFolder(root / "federation")
        self.population = population_of(self.config, labeled)
        self.run = self.folder.path / "run"
        if not self.folder.path.exists():
            shutil.copytree(_provisioned(nodes), self.folder.path)
            write_data(root, self.population, nodes)

    def nodes(
        self, *names: str, withhold: tuple[str, ...] = (), secure: bool = False
    ) -> list[Stub]:
        found = []
        for name in names or self.names:
            kit, data = Kit(self.folder.kit(name), name), self.root / "data" / name
            write_node_settings(kit, NodeSettings(data, withhold, secure=secure))
            os.environ[KIT_VARIABLE] = str(kit.path)
            found.append(Stub(name, Node()))
        return found

    def train(self, stubs: Sequence[Stub], **federation: Any) -> str:
        settings = FederationSettings(**federation)
        calls = CallSettings(timeout=60, silence=30)
        request = request_table(1, plain(self.config), self.run, calls, settings, [])
        return Coordinator(str(self.folder.path)).train(request, stubs)
