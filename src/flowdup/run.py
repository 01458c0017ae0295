"""A run and its folder: training that can be killed at any moment and continued to the same bits.

config.toml     the resolved settings
clients.json    who is in which group, who has labels, and of which images each is made;
                of lazy clients, how they are made
metrics.jsonl   one line per round
checkpoint/     psi and the server's memory
evaluation.json accuracy of test clients (`evaluate_run`)
report.html     curves, accuracy, settings
"""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from flowdup.accelerate.host_scalars import HostScalars
from flowdup.checkpoint import FederationSpec, load_checkpoint, save_checkpoint
from flowdup.config import Config, load_config, read_config, read_toml
from flowdup.cost import Cost, measure
from flowdup.data import ClientData, LazyClients, Population, load_population
from flowdup.engines import Engine, build_engine
from flowdup.engines.distributed import is_main_process, wait_for_all
from flowdup.errors import CheckpointError, ConfigError, DataError
from flowdup.evaluation import evaluate, mean_accuracy, transductive_accuracy
from flowdup.files import cannot_write, write_atomic
from flowdup.methods import Method, MethodContext, Params
from flowdup.personalize import load
from flowdup.provenance import provenance
from flowdup.random import Stream
from flowdup.report import embedding_figure, write_report
from flowdup.server import Round, ServerState, check_roster, initial_state, train
from flowdup.settings import to_toml

Metrics = dict[str, Any]
_MOST_IN_A_FIGURE = 10_000  # clients

_AHEAD = 8  # rounds that a GPU has been given and not yet done


class Simulation:
    """A configuration made ready to run: clients, method, engine."""

    def __init__(self, config: Config, population: Population | None = None) -> None:
        self.config, self.stream = config, Stream(config.seed)
        if population is None:
            population = load_population(config.data, self.stream.child("data"))
        else:
            population = population.checked()
        self.population = population
        self.device, self.dtype = config.engine.torch_device(), config.engine.torch_dtype()
        inputs = self.population.spec
        compute = config.engine.compute_dtype()
        context = MethodContext(config.model, inputs, self.stream, self.device, self.dtype, compute)
        self.method: Method = config.method.build(context)
        self.engine: Engine = build_engine(
            config.engine, self.method, config.client, population.train, self.stream
        )
        self.federation = FederationSpec.of(
            config.seed, config.model, config.method.table(), inputs, self.method
        )

    def initial_state(self) -> ServerState:
        return initial_state(self.config.server, self.method, self.stream, self.device, self.dtype)

    def load_state(self, folder: Path) -> ServerState:
        spec, state = load_checkpoint(folder)
        if spec != self.federation:
            spec.check(self.method)
            raise CheckpointError(f"{folder} belongs to another federation: choose another folder")

        def here(tensors: dict[str, Any]) -> dict[str, Any]:
            return {n: t.to(self.device, self.dtype) for n, t in tensors.items()}

        # in the order of `init`: sums over parameters must come out the same, in every process
        psi = {n: state.psi[n] for n in self.method.init(self.stream)}
        return ServerState(state.round, here(psi), here(state.optimizer), here(state.method))

    def listing(self) -> bytes:
        return json.dumps(self.population.listing()).encode()

    def check_clients(self, out: Path) -> None:
        """Refuse clients other than those that a run was started with."""
        path = out / "clients.json"
        if path.exists() and path.read_bytes() != self.listing():
            raise DataError(
                f"the clients are not those in {path}, with which the run was started: restore "
                "their data or choose another folder"
            )

    def cost(self, psi: Params) -> Cost:
        """What the method asks of a client of middling size."""
        clients = self.population.train or self.population.test
        if isinstance(clients, LazyClients):
            points = clients.points
        else:
            points = round(statistics.median(map(len, clients)))
        return measure(self.method, self.config.client, self.population.spec, psi, points)

    def rounds(self, state: ServerState) -> Iterator[tuple[ServerState, Metrics]]:
        """Train on from a state; evaluated rounds carry the accuracy of validation clients.

        On a GPU some more rounds are on their way before the first is read.
        """
        config, waiting = self.config, deque[tuple[Round, HostScalars]]()
        ahead = _AHEAD if self.device.type == "cuda" else 0
        for latest in train(config.server, self.method, self.engine, state, self.stream):
            waiting.append((latest, HostScalars([latest.loss, *latest.broadcast.values()])))
            number = latest.state.round
            due = number % config.run.evaluate_every == 0 or number == config.server.rounds
            while waiting and (due or len(waiting) > ahead):
                result, numbers = waiting.popleft()
                metrics = _metrics(result, numbers.read())
                if due and result is latest:
                    metrics |= self._validate(result.state.psi)
                yield result.state, metrics

    def _validate(self, psi: Params) -> Metrics:
        clients = self.population.validation
        accuracy = transductive_accuracy(self.engine, psi, clients) if clients else None
        return {} if accuracy is None else {"validation_accuracy": accuracy}


def _metrics(result: Round, numbers: Sequence[float]) -> Metrics:
    loss, *broadcast = numbers
    return {
        "round": result.state.round,
        "loss": loss if math.isfinite(loss) else None,
        **dict(zip(result.broadcast, broadcast, strict=True)),
        "padding": round(result.padding, 4),
    }


def train_run(
    config: Config, out: str | Path, resume: bool = False, population: Population | None = None
) -> Iterator[Metrics]:
    """Train into a run folder and yield every round's metrics.

    Nothing happens until the first round is asked for.  `population` replaces the clients that the
    configuration describes.  Of several processes (torchrun) one writes and yields.
    """
    out = Path(out)
    checkpoint, metrics_file = out / "checkpoint", out / "metrics.jsonl"
    started = (checkpoint / "checkpoint.json").exists()
    if started and not resume:
        raise ConfigError(f"{out} holds a run already: add --resume or choose another folder")
    if started:
        _check_continues(config, read_run_config(out))
    simulation = Simulation(config, population)
    if started:
        simulation.check_clients(out)
    state = simulation.load_state(checkpoint) if started else simulation.initial_state()
    check_roster(config.server, simulation.method, simulation.engine.roster)
    wait_for_all()  # until everyone has read what the leading process may now change
    if not is_main_process():
        for _ in simulation.rounds(state):
            pass
        return
    write_atomic(out / "config.toml", to_toml(config).encode())
    write_atomic(out / "clients.json", simulation.listing())
    before = _keep_metrics(metrics_file, state.round)
    start = time.monotonic() - before
    for latest, metrics in simulation.rounds(state):
        metrics["seconds"] = round(time.monotonic() - start, 3)
        _append(metrics_file, metrics)
        if latest.round % config.run.checkpoint_every == 0 or latest.round == config.server.rounds:
            save_checkpoint(checkpoint, simulation.federation, latest)
        yield metrics
    write_report(out)


def evaluate_run(out: str | Path, population: Population | None = None) -> dict[str, Any]:
    """Personalise every test client from its unlabeled points and score it; writes the result."""
    out = Path(out)
    simulation = Simulation(read_run_config(out), population)
    if population is None:
        simulation.check_clients(out)
    state = simulation.load_state(out / "checkpoint")
    stream = simulation.stream.child("held-out")
    scores = evaluate(simulation.engine, state.psi, simulation.population.test, stream)
    result = {
        "method": simulation.config.method.name,
        "k": simulation.method.k,
        "round": state.round,
        "accuracy": mean_accuracy(scores),
        "cost": asdict(simulation.cost(state.psi)),
        "clients": [asdict(score) for score in scores],
        **provenance(simulation.device),
    }
    if is_main_process():
        write_atomic(out / "evaluation.json", json.dumps(result, indent=2).encode())
        write_report(out)
    return result


def embed_run(
    folder: str | Path,
    by: str = "",
    group: str = "validation",
    out: Path | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Draw the embeddings r(X) of a group of clients, coloured by a trait (rotation, if any).

    The clients are the run's own or, with settings `data.KEY=VALUE`, others.
    """
    folder = Path(folder)
    if any(not text.startswith("data.") for text in settings):
        raise ConfigError("only data settings can change here: the federation is trained already")
    federation = load(folder)
    config = load_config(str(folder / "config.toml"), settings)
    population = load_population(config.data, Stream(config.seed).child("data"))
    if group not in ("train", "validation", "test"):
        raise ConfigError(f"a group is train, validation or test, not '{group}'")
    clients: Sequence[ClientData] = getattr(population, group)
    if not clients:
        raise DataError(f"there are no {group} clients: choose another group")
    if len(clients) > _MOST_IN_A_FIGURE:
        raise DataError(
            f"{len(clients):,} clients are too many for a figure: choose another group, or fewer "
            f"with data.{group}_clients"
        )
    traits = sorted({name for client in clients for name in client.traits})
    if by and by not in traits:
        raise DataError(f"clients have no trait '{by}': use one of {', '.join(traits) or '(none)'}")
    by = by or next(iter(sorted(traits, key=lambda trait: trait != "rotation")), "")
    target = out or folder / "embedding"
    measures = embedding_figure(
        torch.stack([federation.embedding(client.x) for client in clients]).numpy(),
        [client.traits.get(by, "") for client in clients],
        ", ".join([by, *settings]),  # the figure says which clients it shows
        target,
    )
    if out is None:
        write_report(folder)
    return {
        "files": [str(target.with_suffix(end)) for end in (".png", ".svg")],
        "by": by,
    } | measures


def read_run_config(out: Path) -> Config:
    path = out / "config.toml"
    if not path.is_file():
        raise CheckpointError(f"{out} is not a run folder: it has no config.toml")
    return read_config(read_toml(path))


def _check_continues(new: Config, old: Config) -> None:
    """A run may go on elsewhere, recorded more often, or with more rounds if no rate hangs on them;
    never as another run.
    """
    server = old.server if old.server.decay else replace(old.server, rounds=new.server.rounds)
    same = replace(old, server=server, engine=new.engine, run=new.run)
    if same != new:
        a, b = to_toml(same).splitlines(), to_toml(new).splitlines()
        changed = next((line for line in b if line not in a), "a setting")
        raise ConfigError(
            f"the run was started with other settings ('{changed.strip()}' is new): resume with "
            "the old ones or choose another folder"
        )


def _keep_metrics(path: Path, last: int) -> float:
    """Drop lines after the checkpoint, and a half-written one; the seconds spent until then."""
    kept: list[Metrics] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            metrics = json.loads(line)
            if metrics["round"] <= last:
                kept.append(metrics)
        except (ValueError, KeyError, TypeError):
            break
    write_atomic(path, "".join(json.dumps(m) + "\n" for m in kept).encode())
    return float(kept[-1]["seconds"]) if kept else 0.0


def _append(path: Path, metrics: Metrics) -> None:
    try:
        with open(path, "a") as file:
            file.write(json.dumps(metrics) + "\n")
    except OSError as error:
        raise cannot_write(path, error) from error
