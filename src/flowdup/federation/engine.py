"""The engine of a federation: ClientUpdate runs at nodes, and replies are checked as they come."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.nn.utils import get_total_norm

from flowdup.calibration import Calibration
from flowdup.engines import Engine, Roster, SupportQuery
from flowdup.errors import (
    CheckpointError,
    ConfigError,
    FederationError,
    MessageError,
    NotFiniteError,
)
from flowdup.federation.calls import Calls
from flowdup.federation.fitting import fit_at_nodes
from flowdup.federation.record import (
    ClientBook,
    NodeRecord,
    RoundRecord,
    append_round,
    note_release,
)
from flowdup.federation.secure_round import SecureRound, further_members, new_terms
from flowdup.federation.settings import FederationSettings, check_federation
from flowdup.federation.stage import stage_request
from flowdup.messages import Reply, Schema, Task, TensorSpec
from flowdup.methods import Params
from flowdup.privacy import PrivateRounds
from flowdup.run.remote import RemotePopulation, RemoteStage
from flowdup.wire import most_bytes, reply_from_bytes, task_to_bytes

_Members = dict[str, dict[int, int]]  # by node, the clients' numbers there by position
_LATER = "the run goes on when more of them are there"


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
    engines: list["FederationEngine"] = field(default_factory=list)  # the latest last

    @property
    def roster(self) -> Roster:
        """The clients of nodes that are alive; FederationError if none of them has labels."""
        found = self.book.roster(self.calls.alive)
        if not len(found.labeled_ids) and len(self.book.roster([*self.book.table]).labeled_ids):
            raise FederationError(f"no node with labels is there: {_LATER}")
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


class FederationEngine:
    """Sends tasks to nodes and gives checked replies, one per client, in the cohort's order."""

    def __init__(self, population: NodePopulation, stage: RemoteStage) -> None:
        self.population, self.stage = population, stage
        dtype, spec = stage.config.engine.torch_dtype(), stage.spec
        self.device = stage.config.engine.torch_device()
        self.schema: Schema = {
            name: TensorSpec(tuple(spec.shapes[f"psi/{name}"]), dtype) for name in spec.psi_names
        }
        self.limit = most_bytes(self.schema)
        self.latest: RoundRecord | None = None
        check_federation(stage.config, population.settings)
        self._begin()

    @property
    def roster(self) -> Roster:
        """Of the nodes that are alive."""
        return self.population.roster

    def _begin(self) -> None:
        """Have every node make ready; one with another P or theta_0 is refused."""
        population, stage = self.population, self.stage
        request = stage_request(
            stage.config, stage.number, stage.spec, population.settings.encoding
        )
        start = save_tensors({n: w.contiguous() for n, w in stage.start.items()})
        start = start if stage.start else b""
        calls = population.calls
        answers = calls.call("begin", {node: (request, start) for node in calls.alive})
        for node in calls.proxies:  # in the order of the federation, which numbers clients
            if node not in answers:
                continue
            try:
                self._enter(node, answers[node])
            except (MessageError, CheckpointError) as error:
                calls.give_up(node, str(error))
                population.refuse(node, 0, str(error))
        if len(calls.alive) < population.settings.minimum:
            raise FederationError(f"{len(calls.alive)} nodes are ready: {_LATER}")

    def _enter(self, node: str, answer: Any) -> None:
        if not isinstance(answer, dict):
            raise MessageError("its answer is none")
        if "error" in answer:  # its own trouble, and no offence
            reason = f"it cannot begin ({answer['error']}), and its own output says why"
            self.population.calls.give_up(node, reason)
            self.population.say(f"{node} stays out: {reason}")
            return
        sha256, clients, labeled = (answer.get(k) for k in ("sha256", "clients", "labeled"))
        if sha256 != self.stage.spec.expansion_sha256:
            raise MessageError("it has another P or theta_0: it needs the same version of flowdup")
        flags = isinstance(labeled, list) and all(type(flag) is bool for flag in labeled)
        if type(clients) is not int or clients < 1:
            raise MessageError("it says of its clients what cannot be")
        most = self.population.settings.most_clients
        if clients > most:
            raise MessageError(
                f"it says that it has more than {most:,} clients: if it should have as many, raise "
                "--most-clients and readmit it"
            )
        if not (labeled is None or (flags and len(labeled) == clients)):
            raise MessageError("it says of its clients what cannot be")
        self.population.book.enter(node, clients, labeled)

    def params_task(self, round: int, params: Params) -> Task:
        """Parameters for evaluation, as a task without a cohort; a correction is broadcast."""
        psi = {n: params[n] for n in self.schema}
        return Task(round, psi, {n: p for n, p in params.items() if n not in psi}, {})

    def train(self, task: Task) -> Iterator[Reply]:
        """Checked replies of those who answered; FederationError if they are too few."""
        began, population = time.monotonic(), self.population
        members: _Members = {}
        for position, client in task.cohort.items():
            node, number = population.book.locate(client)
            members.setdefault(node, {})[position] = number
        collect = self._sum if population.settings.secure else self._collect
        found = collect(task, members)
        for node, reason in found.refused.items():
            population.refuse(node, task.round, reason)
        record = RoundRecord(
            task.round,
            [*members],
            found.answered,
            found.missing,
            found.refused,
            sum(reply.clients for reply in found.replies),
            found.down,
            found.up,
            round(time.monotonic() - began, 3),
        )
        append_round(population.run, record)
        self.latest = record
        for node, reason in found.missing.items():
            population.say(f"round {task.round}: without {node}: {reason}")
        few = len(found.answered) < min(population.settings.minimum, len(members))
        if few or not found.replies:
            why = found.failure or f"{len(found.answered)} nodes answered"
            raise FederationError(f"round {task.round}: {why}: {_LATER}")
        yield from found.replies

    def _collect(self, task: Task, members: _Members) -> "_Found":
        """Every client's own reply, checked, in the cohort's order."""
        found = _Found()
        asked = {node: (task_to_bytes(_share(task, own)),) for node, own in members.items()}
        found.down = {node: len(content) for node, (content,) in asked.items()}
        calls, replies = self.population.calls, dict[int, Reply]()
        answers = calls.call("train", asked)
        found.missing = {n: calls.lost.get(n, "") for n in asked if n not in answers}
        for node, answer in answers.items():
            try:
                if isinstance(answer, dict) and "error" in answer:
                    found.missing[node] = f"it could not train ({answer['error']})"
                    continue
                contents = _contents(answer, len(members[node]))
                found.up[node] = sum(map(len, contents))
                replies |= self._read(node, contents, members[node], task.round)
                found.answered.append(node)
            except MessageError as error:
                found.refused[node] = str(error)
        found.replies = [replace(replies[p], member=p) for p in sorted(replies)]
        if found.answered and not replies:
            found.failure = "no reply has finite numbers"
        return found

    def _read(
        self, node: str, contents: list[bytes], members: dict[int, int], round: int
    ) -> dict[int, Reply]:
        """A node's replies by position; MessageError if one is none.

        With noise for privacy, one client's numbers must not decide about the others of its node:
        a reply that is not finite is left out alone, one that is too long is clipped later, and
        neither is held against the node.
        """
        private, found = self.stage.config.server.privacy.noise > 0, dict[int, Reply]()
        for position, content in zip(members, contents, strict=True):
            try:
                reply = reply_from_bytes(content, round, self.schema, self.limit)
                found[position] = reply if private else self._checked(reply)
            except NotFiniteError as error:
                if not private:
                    raise
                self.population.say(f"round {round}: without a client of {node}: {error}")
        return found

    def _sum(self, task: Task, members: _Members) -> "_Found":
        """One reply, the sum over all nodes that stayed to the end; where the cohort is at too few
        of them, others become members, too, with no client.
        """
        population, training = self.population, len(members)
        for node in further_members(members, population.calls.alive):
            members[node] = {}
        clients = {node: len(own) for node, own in members.items()}
        terms = new_terms(task.round, clients, population.settings.number_bound)
        if training < len(members):
            told = f"round {task.round}: {len(members)} nodes are in the secure sum, and"
            population.say(f"{told} it holds updates of {training} alone, who have the cohort")
        secure = SecureRound(population.calls, population.kit, terms, self.schema)
        tasks = {node: task_to_bytes(_share(task, own)) for node, own in members.items()}
        found = _Found(secure.missing, secure.refused, secure.down, secure.up)
        try:
            reply, found.answered = secure.run(tasks, clients)
            found.replies = [reply]
        except MessageError as error:
            found.failure = str(error)
        return found

    def _checked(self, reply: Reply) -> Reply:
        bound = self.population.settings.norm_bound
        norm = get_total_norm([d.double() for d in reply.whole_delta().values()])
        if not float(norm) <= bound:
            raise MessageError(
                f"an update has the norm {float(norm):.3g}, above {bound:g}: drop it"
            )
        if self.device.type == "cpu":
            return reply
        raise ConfigError("the coordinator of a federation works on the CPU: set engine.device")

    def logits(self, params: Params, pairs: Sequence[SupportQuery]) -> list[Tensor]:
        """None: the coordinator has no data, and nodes answer with accuracies."""
        if pairs:
            raise FederationError("a coordinator has no inputs: evaluate at nodes")
        return []


@dataclass
class _Found:
    """What came of a round."""

    missing: dict[str, str] = field(default_factory=dict)  # why, by node
    refused: dict[str, str] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)  # bytes, by node
    up: dict[str, int] = field(default_factory=dict)
    answered: list[str] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    failure: str = ""  # why there is no reply


def _share(task: Task, members: dict[int, int]) -> Task:
    return Task(task.round, task.psi, task.broadcast, members)


def _contents(answer: Any, members: int) -> list[bytes]:
    contents = answer.get("replies") if isinstance(answer, dict) else None
    if not isinstance(contents, list) or not all(isinstance(c, bytes) for c in contents):
        raise MessageError("an answer holds no replies: drop it")
    if len(contents) != members:
        raise MessageError(f"{len(contents)} replies came for {members} clients: drop them")
    return contents
