"""The clients of all nodes of a job, as a run sees them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowdup.calibration import Calibration
from flowdup.engines import Engine, Roster
from flowdup.errors import FederationError
from flowdup.federation.calls import Calls
from flowdup.federation.engine import LATER, FederationEngine
from flowdup.federation.fitting import fit_at_nodes
from flowdup.federation.record import ClientBook, NodeRecord, note_release
from flowdup.federation.settings import FederationSettings
from flowdup.methods import Params
from flowdup.privacy import PrivateRounds
from flowdup.run.remote import RemotePopulation, RemoteStage
from flowdup.wire import task_to_bytes


@dataclass(frozen=True, kw_only=True)
class NodePopulation(RemotePopulation):
    """The clients of all nodes of a job."""

    calls: Calls
    book: ClientBook
    record: NodeRecord
    run: Path
    settings: FederationSettings
    origin: dict[str, Any]  # what identifies the federation
    kit: Path  # the coordinator's own
    say: Callable[[str], None]
    engines: list[FederationEngine] = field(default_factory=list)  # the latest last

    @property
    def roster(self) -> Roster:
        """The clients of nodes that are alive; FederationError if none of them has labels."""
        found = self.book.roster(self.calls.alive)
        if not len(found.labeled_ids) and len(self.book.roster([*self.book.table]).labeled_ids):
            raise FederationError(f"no node with labels is there: {LATER}")
        return found

    def connect(self, stage: RemoteStage) -> Engine:
        """The engine of a stage; FederationError if too few nodes are ready."""
        engine = FederationEngine(self, stage)
        self.engines.append(engine)
        return engine

    def accuracies(self, round: int, params: Params) -> Sequence[float]:
        """Of the validation clients of all nodes; a node that sends no percentages is refused."""
        task = task_to_bytes(self.engines[-1].params_task(round, params))
        answers = self.calls.call("evaluate", {node: (task,) for node in self.calls.alive})
        found: list[float] = []
        for node, answer in answers.items():
            if isinstance(answer, dict) and "error" in answer:  # its own trouble, and no offence
                self.say(f"round {round}: {node} could not evaluate ({answer['error']})")
                continue
            values = answer.get("accuracies") if isinstance(answer, dict) else None
            if isinstance(values, list) and all(type(v) is float and 0 <= v <= 100 for v in values):
                found += values
            else:
                self.refuse(node, round, "its accuracies are no percentages")
        return found

    def calibrate(self, round: int, params: Params) -> Calibration | None:
        """Fitted by sums over the nodes' validation clients, whose logits and labels stay there."""
        engine = self.engines[-1]
        task = task_to_bytes(engine.params_task(round, params))

        def refuse(node: str, reason: str) -> None:
            self.refuse(node, round, reason)

        classes, interpolates = self.spec.classes, engine.stage.interpolates
        return fit_at_nodes(self.calls, task, classes, interpolates, refuse)

    def note_release(self, round: int, psi: Params, draw: PrivateRounds) -> list[PrivateRounds]:
        """In the run folder, where a coordinator that was killed finds it again."""
        return note_release(self.run, round, psi, draw)

    def traffic(self) -> dict[str, int]:
        """Of the latest round: bytes per client, psi being sent once to a node."""
        latest = self.engines[-1].latest
        if latest is None or not latest.clients:
            return {}
        up, down = sum(latest.bytes_up.values()), sum(latest.bytes_down.values())
        return {
            "bytes_up_per_client": round(up / latest.clients),
            "bytes_down_per_client": round(down / latest.clients),
        }

    def keep(self, round: int, params: Params) -> list[str]:
        """Give psi to all nodes, who make their models; who has done so."""
        task = task_to_bytes(self.engines[-1].params_task(round, params))
        answers = self.calls.call("keep", {node: (task,) for node in self.calls.alive})
        return [node for node, answer in answers.items() if answer == {}]

    def listing(self) -> dict[str, Any]:
        """The authority: a run goes on in its own federation only."""
        return self.origin

    def refuse(self, node: str, round: int, reason: str) -> None:
        """Note it, and suspend the node if it is once too often."""
        self.say(f"round {round}: refused {node}: {reason}")
        if self.record.refuse(node, round, reason):
            self.calls.give_up(node, "it is suspended")
            self.say(f"round {round}: {node} is suspended, after too many refusals")
