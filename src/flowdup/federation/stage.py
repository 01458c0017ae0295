"""A stage of a run at a node: its clients in the stage's form, its method and ClientUpdate."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flowdup.calibration import MOVES, ClientsHere, uncorrected
from flowdup.config import Config, read_config
from flowdup.data.clients import ClientData
from flowdup.data.given_clients import read_given_clients
from flowdup.engines import build_engine
from flowdup.errors import MessageError
from flowdup.evaluation import transductive_logits
from flowdup.federation_spec import FederationSpec, read_spec
from flowdup.messages import Reply, Schema, Task, TensorSpec
from flowdup.methods import MethodContext, Params
from flowdup.methods.corrected import PREFIX
from flowdup.params import prefixed
from flowdup.random import Stream
from flowdup.settings import plain
from flowdup.stored_tensors import load_tensors
from flowdup.strict_json import get_object, get_text
from flowdup.wire import most_bytes, reply_with_feedback, task_from_bytes


class NodeStage:
    """What a stage needs: clients in its form, its method and engine."""

    def __init__(self, table: dict[str, Any], start: bytes, data: Path, as_one: bool) -> None:
        self.config = config = read_config(get_object(table, "config"))
        inputs = read_spec(get_object(table, "inputs"))
        self.number, self.encoding = int(table["number"]), get_text(table, "encoding")
        self.start = load_tensors(start) if start else {}
        self.stream, self.as_one = Stream(config.seed), as_one
        grouped = (data / "train").is_dir()
        self.clients = read_given_clients(data, config.data, inputs, "train" if grouped else "")
        self.validation: list[ClientData] = []
        if grouped and (data / "validation").is_dir():
            self.validation = read_given_clients(data, config.data, inputs, "validation")
        engine = replace(config.engine, name="sequential", device="auto")
        device, self.dtype = engine.torch_device(), engine.torch_dtype()
        context = MethodContext(
            config.model,
            inputs,
            self.stream,
            device,
            self.dtype,
            engine.compute_dtype(),
            start=self.start or None,
        )
        self.method = config.method.build(context)
        self.spec = FederationSpec.of(
            config.seed, config.model, config.method.table(), inputs, self.method
        )
        self.engine = build_engine(engine, self.method, config.client, self.clients, self.stream)
        self.device = device
        self.residuals: dict[int, Params] = {}  # by client, what rounding left out of its replies
        self.schema: Schema = {
            name: TensorSpec(tuple(self.spec.shapes[f"psi/{name}"]), self.dtype)
            for name in self.spec.psi_names
        }
        self.limit = most_bytes(self.schema)

    def read(self, data: bytes) -> Task:
        """A checked task, on this machine's device."""
        task = task_from_bytes(data, self.schema, self.limit)
        psi, broadcast = (
            {n: t.to(self.device, self.dtype) for n, t in tensors.items()}
            for tensors in (task.psi, task.broadcast)
        )
        return replace(task, psi=psi, broadcast=broadcast)

    def replies(self, data: bytes) -> Iterator[tuple[int, Reply]]:
        """Of the members of a cohort that are here: the client, and its reply."""
        task = self.read(data)
        if self.as_one:  # the node itself draws who of its clients takes part
            draw = self.stream.child("withheld", task.round)
            cohort = {p: draw.child(p).integers(1, len(self.clients))[0] for p in task.cohort}
            task = replace(task, cohort={p: int(chosen) for p, chosen in cohort.items()})
        if any(client >= len(self.clients) for client in task.cohort.values()):
            raise MessageError("a task names a client that is not here: drop it")
        if not task.cohort:  # the node is in a secure sum for its masks alone
            return iter(())
        return zip(task.cohort.values(), self.engine.train(task), strict=True)

    def train(self, data: bytes) -> list[bytes]:
        """The replies of the members of a cohort that are here, in the order of the cohort."""
        replies = []
        for client, reply in self.replies(data):
            residual = self.residuals.get(client, {})
            content, self.residuals[client] = reply_with_feedback(reply, residual, self.encoding)
            replies.append(content)
        return replies

    def accuracies(self, data: bytes) -> list[float]:
        """Of validation clients, each with its own model; where they are not told apart, a mean."""
        task = self.read(data)
        labeled = self.labeled
        found = []
        for client, logits in zip(
            labeled, transductive_logits(self.engine, task.start, labeled), strict=True
        ):
            known = client.labels >= 0
            right = logits.argmax(1)[known] == client.labels[known]
            found.append(100 * float(right.double().mean()))
        return [sum(found) / len(found)] if self.as_one and found else found

    @property
    def labeled(self) -> list[ClientData]:
        """Validation clients with labels."""
        return [client for client in self.validation if client.labeled]

    def calibrating(self, data: bytes) -> ClientsHere | None:
        """Validation clients that a correction of psi can be fitted on; None if there are none."""
        task, labeled, logits = self.read(data), self.labeled, {}
        for move in MOVES if self.method.interpolates else (1.0,):
            plain = prefixed(PREFIX, uncorrected(self.spec.inputs.classes, move))
            params = task.psi | {n: t.to(self.device, self.dtype) for n, t in plain.items()}
            logits[move] = transductive_logits(self.engine, params, labeled)
        if not labeled:
            return None
        return ClientsHere(logits, [client.labels for client in labeled], self.device)


def stage_request(config: Config, number: int, spec: FederationSpec, encoding: str) -> str:
    """What `begin` reads."""
    table = {
        "config": plain(config),
        "number": number,
        "inputs": asdict(spec.inputs),
        "encoding": encoding,
    }
    return json.dumps(table)
