"""The coordinator's side of a job: our own training loop, whose clients are at nodes.

One job of a chain: it goes on from the latest checkpoint in the run folder, and ends when training
is finished, when `stop` asks for it (a node has come back, and FLARE lets nobody into a running
job), or when too few nodes answer.
"""

import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from flowdup.checkpoint import load_checkpoint
from flowdup.config import Config, read_config
from flowdup.errors import ConfigError, FederationError, FlowdupError, FolderInUseError
from flowdup.federation.calls import Calls, CallSettings
from flowdup.federation.engine import NodePopulation
from flowdup.federation.folder import FederationFolder, read_json, write_json
from flowdup.federation.inputs import find_inputs
from flowdup.federation.kit import authority_digest
from flowdup.federation.record import ClientBook, NodeRecord
from flowdup.federation.settings import FederationSettings
from flowdup.registry import import_modules
from flowdup.run.folder import RunFolder
from flowdup.run.training import train_run

FINISHED, STOPPED, WAITING, FAILED = "finished", "stopped", "waiting", "failed"


class Coordinator:
    """The main of a job; `folder` is the federation's."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files = FederationFolder(Path(folder))
        self.job: dict[str, Any] = {}

    @collab.main
    def run(self) -> None:
        """Train, and say in job.json how it ended."""
        request = read_json(self.files.request)
        self.job = {"number": request["number"], "pid": os.getpid(), "outcome": "", "message": ""}
        try:
            self._write_job(outcome=self.train(request, collab.clients))
        except (FederationError, FolderInUseError) as error:  # the next job may go on
            self._write_job(outcome=WAITING, message=str(error))
        except FlowdupError as error:
            self._write_job(outcome=FAILED, message=str(error))
        except BaseException as error:
            self._write_job(outcome=FAILED, message=f"{type(error).__name__}: {error}")
            raise

    def train(self, request: dict[str, Any], proxies: Any) -> str:
        """Train with these nodes (FLARE's stand-ins for them); how it ended."""
        import_modules(request["modules"])
        config = read_config(request["config"])
        config = replace(config, run=replace(config.run, checkpoint_every=1))
        config = replace(config, engine=replace(config.engine, device="cpu"))
        out = RunFolder(Path(request["out"]))
        record = NodeRecord(self.files)
        by_name = {proxy.name: proxy for proxy in proxies}
        order = [n for n in self.files.read_names().nodes if n in by_name]
        calls = Calls({n: by_name[n] for n in order}, CallSettings(**request["calls"]))
        for node in record.suspended:
            calls.give_up(node, "it is suspended")
        self._write_job(nodes=calls.alive)
        population = self._population(config, out, calls, record, request)
        stopped = False
        rounds = train_run(config, out.path, resume=True, population=population, stop=self._stops)
        while True:
            try:
                metrics = next(rounds)
            except StopIteration as end:
                stopped = bool(end.value)
                break
            except ConfigError as error:
                if not calls.lost:
                    raise
                away = ", ".join(calls.lost)
                raise FederationError(f"without {away}: {error}") from None  # who may come back
            self._tell(metrics, calls)
        _, state = load_checkpoint(out.kept)
        done = population.keep(state.round, state.deployed) if population.engines else []
        self._write_job(nodes=calls.alive, lost=calls.lost, kept=done)
        self._say(f"round {state.round}: psi is with {len(done)} nodes, who made their models")
        return STOPPED if stopped else FINISHED

    def _population(
        self,
        config: Config,
        out: RunFolder,
        calls: Calls,
        record: NodeRecord,
        request: dict[str, Any],
    ) -> NodePopulation:
        out.path.mkdir(parents=True, exist_ok=True)
        spec = find_inputs(config, out.path, calls)
        book = ClientBook.load(out.path)
        origin = {"authority_sha256": authority_digest(self.files.coordinator)}
        return NodePopulation(
            spec=spec,
            train=[],
            validation=[],
            test=[],
            calls=calls,
            book=book,
            record=record,
            run=out.path,
            settings=FederationSettings(**request["federation"]),
            origin=origin,
            kit=self.files.coordinator,
            say=self._say,
        )

    def _tell(self, metrics: dict[str, Any], calls: Calls) -> None:
        self._write_job(nodes=calls.alive, lost=calls.lost, lost_at=calls.lost_at)
        loss, accuracy = metrics.get("loss"), metrics.get("validation_accuracy")
        told = f"round {metrics['round']}: loss {loss:.4f}, {len(calls.alive)} nodes"
        if accuracy is not None:
            told += f", accuracy of validation clients {accuracy:.2f} %"
        if "epsilon" in metrics:
            told += f", epsilon {metrics['epsilon']:.3g}"
        self._say(told)

    def _stops(self) -> bool:
        return self.files.stop.exists()

    def _say(self, line: str) -> None:
        with open(self.files.log, "a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def _write_job(self, **changes: Any) -> None:
        self.job |= changes
        write_json(self.files.job, self.job)


def request_table(
    number: int,
    config: dict[str, Any],
    out: Path,
    calls: CallSettings,
    federation: FederationSettings,
    modules: list[str],
) -> dict[str, Any]:
    """What `flowdup federation run` writes for the job to read."""
    return {
        "number": number,
        "config": config,
        "out": str(out.resolve()),
        "calls": asdict(calls),
        "federation": asdict(federation),
        "modules": modules,
    }
