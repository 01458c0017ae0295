"""A federation of seven processes on this machine, one killed on the way: `make federation-demo`.

Six nodes, four without labels, train ten rounds on rotated digits.  Before anyone is killed psi is
compared with the simulator's; then one node is ended with -9 and started again, and in the end
every node has models of its own.
"""

import argparse
import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowdup.checkpoint import load_checkpoint
from flowdup.config import Config, load_config
from flowdup.data import ClientData, Population, load_population
from flowdup.federation.local import LocalFederation, write_clients
from flowdup.federation.record import read_rounds
from flowdup.federation.status import federation_status
from flowdup.personalize import load_model
from flowdup.provenance import provenance
from flowdup.random import Stream
from flowdup.run.folder import ComparisonFolder, RunFolder
from flowdup.run.simulation import Simulation
from flowdup.server import ServerState

NODES = tuple(f"hospital-{number}" for number in range(1, 7))
_CONFIG = str(Path(__file__).with_name("demo.toml"))
_LABELED = 2  # nodes
_KILLED = NODES[3]
_COMPARED = 3  # the round after which psi is compared, before the kill
_SECONDS = 240.0  # for all of it


def main() -> None:
    """The command: run the demo and print its summary."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/federation-demo"))
    summary = run_demo(parser.parse_args().out)
    print(json.dumps(summary, indent=2))


def run_demo(out: Path) -> dict[str, Any]:
    """Run it all into a folder; what summary.json there holds."""
    began = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    config = load_config(_CONFIG)
    everyone = load_population(config.data, Stream(config.seed).child("data"))
    shares = _shares(everyone.train)
    population = replace(everyone, train=[c for own in shares.values() for c in own])
    with LocalFederation(out.resolve()) as local:
        local.init(NODES)
        for number, (node, own) in enumerate(shares.items()):
            write_clients(local.root / "data" / node / "train", own)
            held = everyone.validation[number :: len(NODES)]
            write_clients(local.root / "data" / node / "validation", held, "held")
        local.start_server()
        for node in NODES:
            local.start_node(node)
        run = local.folder.path / "run"
        local.start("run", "federation", "run", _CONFIG, str(local.folder.path))
        _say("coordinator and nodes are started")
        _wait(local, lambda: _round(run) >= _COMPARED, began)
        _, before = load_checkpoint(RunFolder(run).checkpoint)
        local.kill(_KILLED)
        killed = time.time()
        _say(f"{_KILLED} was killed after round {before.round}")
        time.sleep(2)  # as a supervisor would
        local.start_node(_KILLED)
        _wait(local, lambda: any(_KILLED in r["missing"] for r in read_rounds(run)), began)
        _say(f"{_KILLED} is started again; the round went on without it")
        code = local.wait("run", _SECONDS)
        if code:
            raise RuntimeError(f"the run failed:\n{local.output('run')}")
        print(local.output("run"), flush=True)
        status = federation_status(local.folder, run, ask=False)
        models = {node: sorted((local.folder.kit(node) / "models").iterdir()) for node in NODES}
    rounds = read_rounds(run)
    missed = next(r for r in rounds if _KILLED in r["missing"])
    summary = {
        "rounds": status["round"],
        "nodes": len(NODES),
        "labeled_nodes": _LABELED,
        "parameters": sum(
            p.numel() for p in load_checkpoint(RunFolder(run).checkpoint)[1].psi.values()
        ),
        "seconds_per_round": _median(r["seconds"] for r in rounds if not r["missing"]),
        "max_difference_to_simulation": _difference(config, population, before),
        "rounds_compared_with_simulation": before.round,
        "seconds_until_round_went_on_after_kill": round(missed["time"] - killed, 2),
        "round_of_kill": missed["round"],
        "rounds_of_killed_node": [r["round"] for r in rounds if _KILLED in r["answered"]],
        "bytes_up_per_client": status["bytes_up_per_client"],
        "bytes_down_per_client": status["bytes_down_per_client"],
        "accuracy": {
            node: _accuracy(models[node], everyone.train[place :: len(NODES)])
            for place, node in enumerate(NODES)
        },
        "seconds": round(time.monotonic() - began, 1),
        **provenance(torch.device("cpu")),
    }
    ComparisonFolder(out).write_summary(summary)
    return summary


def _shares(clients: Sequence[ClientData]) -> dict[str, list[ClientData]]:
    """Every node's clients; only the first nodes keep labels."""
    shares = {}
    for place, node in enumerate(NODES):
        own = list(clients[place :: len(NODES)])
        shares[node] = own if place < _LABELED else [client.unlabeled() for client in own]
    return shares


def _wait(local: LocalFederation, done: Callable[[], bool], began: float) -> None:
    while not done():
        if local.processes["run"].poll() is not None or time.monotonic() - began > _SECONDS:
            raise RuntimeError(f"the run does not go on:\n{local.output('run')}")
        time.sleep(0.05)


def _round(run: Path) -> int:
    return RunFolder(run).count_rounds()


def _difference(config: Config, population: Population, state: ServerState) -> float:
    """The largest of a number of psi, after as many rounds of the simulator."""
    simulation = Simulation(config, population)
    for mine, _ in simulation.rounds(simulation.initial_state()):
        if mine.round == state.round:
            apart = (float((mine.psi[n] - p).abs().max()) for n, p in state.psi.items())
            return max(apart)
    raise AssertionError("the federation did more rounds than there are")


def _accuracy(models: Sequence[Path], clients: Sequence[ClientData]) -> float:
    """In percent: of clients' own models on the points that they are made from, whose labels the
    nodes without labels never had.
    """
    found = []
    for path, client in zip(models, clients, strict=True):
        right = load_model(path).predict(client.x) == client.labels
        found.append(100 * float(right.double().mean()))
    return round(statistics.fmean(found), 2)


def _median(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds), 3)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    main()
