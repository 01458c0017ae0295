"""The node's side of a job: its clients, the method and ClientUpdate, resident for the whole job.

What it says to the coordinator is listed here: `describe` and `begin` answer with counts, labeled
or not, shapes and channel sums, `train` with replies, `evaluate` with accuracies, `shares`,
`likelihood` and `grid` with sums and accuracies of validation clients.  Of an error only the kind
is told, since its sentence may speak of data; the sentence is printed here.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from nvflare.collab import collab
from nvflare.collab.api.context import get_call_context

from flowdup.checkpoint import save_checkpoint
from flowdup.config import read_config
from flowdup.data.inspection import find_source
from flowdup.data.loading import read_clients
from flowdup.data.statistics import ChannelSums, combine
from flowdup.devices import one_core
from flowdup.errors import FlowdupError, MessageError
from flowdup.federation.fitting import NodeFitting
from flowdup.federation.folder import write_json
from flowdup.federation.kit import open_kit
from flowdup.federation.models import DATA_FILE, write_models
from flowdup.federation.processes import KIT_VARIABLE, read_node_settings
from flowdup.federation.secure_keys import SignedKeys
from flowdup.federation.secure_node import SecureNode, read_terms
from flowdup.federation.stage import NodeStage
from flowdup.methods.corrected import PREFIX
from flowdup.params import strip_prefix
from flowdup.registry import import_modules
from flowdup.server import ServerState
from flowdup.settings import plain
from flowdup.strict_json import read_object
from flowdup.version import __version__

Answer = dict[str, Any]  # of plain values and bytes
_COORDINATOR = "server"  # its name in FLARE's calls
_MOST_REQUEST = 2**20  # characters


class Node:
    """One node of a federation; FLARE makes it when a job begins and calls it from there on."""

    def __init__(self) -> None:
        kit = open_kit(Path(os.environ[KIT_VARIABLE]))
        self.kit, self.settings = kit.path, read_node_settings(kit)
        self.data = self.settings.data
        import_modules(self.settings.modules)
        self.lock = threading.Lock()  # one call at a time, but for `ping`
        self.stage: NodeStage | None = None
        self.name = kit.node
        self.sum: SecureNode | None = None  # of the round in hand
        self.fitting = NodeFitting(None, False)  # of a correction

    @collab.publish
    def ping(self) -> str:
        """A sign of life, also while another call is in hand."""
        return "here"

    @collab.publish
    def describe(self, request: str) -> Answer:
        """What inputs look like, where the coordinator cannot know: shape, type, classes, sums."""
        return self._answer("describe", lambda: self._describe(request))

    @collab.publish
    def begin(self, request: str, start: bytes) -> Answer:
        """Make ready for a stage; the answer says who is here, and the SHA-256 of P and theta_0."""
        return self._answer("begin", lambda: self._begin(request, start))

    @collab.publish
    def train(self, task: bytes) -> Answer:
        """The replies of the members of a cohort that are here, in the order of the cohort."""
        return self._answer("train", lambda: {"replies": self._train(task)})

    @collab.publish
    def secure_keys(self, terms: str) -> Answer:
        """Begin a secure sum: this node's keys in it, signed."""
        return self._answer("begin a secure sum", lambda: {"content": self._begin_sum(terms)})

    @collab.publish
    def secure_share(self, keys: Answer) -> Answer:
        """Sealed shares of this node's secrets, for each of the other nodes."""
        return self._answer("share", lambda: {"content": self._sum().share(keys)})

    @collab.publish
    def secure_mask(self, task: bytes, sealed: Answer) -> Answer:
        """Train; the sum of the updates of the cohort's members that are here, behind masks."""
        return self._answer("train", lambda: {"content": self._train_masked(task, sealed)})

    @collab.publish
    def secure_reveal(self, survivors: list[str]) -> Answer:
        """Shares that take the masks off the whole sum."""
        return self._answer("reveal", lambda: {"content": self._sum().reveal(survivors)})

    @collab.publish
    def evaluate(self, task: bytes) -> Answer:
        """The accuracy of validation clients, each with its own model; withheld: their mean."""
        return self._answer("evaluate", lambda: {"accuracies": self._stage().accuracies(task)})

    @collab.publish
    def calibrate(self, task: bytes) -> Answer:
        """Make ready for the fit of a correction: whether there are clients to fit it on."""
        return self._answer("calibrate", lambda: self._calibrate(task))

    @collab.publish
    def likelihood(self, move: float, parameters: list[float]) -> Answer:
        """Sums over the labeled points of validation clients, at one scale and bias."""
        return self._answer("calibrate", lambda: self.fitting.likelihood(move, parameters))

    @collab.publish
    def shares(self) -> Answer:
        """Class shares of validation clients, each client's largest first, summed."""
        return self._answer("calibrate", self.fitting.shares)

    @collab.publish
    def grid(self, move: float, parameters: list[float], profile: list[float]) -> Answer:
        """The accuracy of validation clients with each setting of the prior; withheld: a mean."""
        return self._answer("calibrate", lambda: self.fitting.grid(move, parameters, profile))

    @collab.publish
    def keep(self, task: bytes) -> Answer:
        """Store psi, from which `flowdup node KIT personalize` makes models, and make them."""
        return self._answer("keep", lambda: self._keep(task))

    def _answer(self, name: str, work: Callable[[], Answer]) -> Answer:
        try:
            _check_caller()
            with self.lock, one_core():
                return work()
        except FlowdupError as error:
            self._say(f"cannot {name}: {error}")
            return {"error": type(error).__name__}
        except Exception as error:
            self._say(f"cannot {name}: {type(error).__name__}: {error}")
            return {"error": type(error).__name__}

    def _say(self, line: str) -> None:
        print(line, flush=True)

    def _stage(self) -> NodeStage:
        if self.stage is None:
            raise MessageError("the coordinator asks for work before a stage has begun: drop it")
        return self.stage

    def _train(self, task: bytes) -> list[bytes]:
        if self.settings.secure:
            raise MessageError("this node sends secure sums alone, and an update was asked for")
        return self._stage().train(task)

    def _begin_sum(self, terms: str) -> SignedKeys:
        self.sum = SecureNode(self.kit, self.name, read_terms(terms, _MOST_REQUEST))
        return self.sum.keys()

    def _sum(self) -> SecureNode:
        if self.sum is None:
            raise MessageError("the coordinator asks for a sum that has not begun: drop it")
        return self.sum

    def _train_masked(self, task: bytes, sealed: Answer) -> bytes:
        stage = self._stage()
        return self._sum().mask(sealed, [reply for _, reply in stage.replies(task)], stage.schema)

    def _describe(self, request: str) -> Answer:
        config = read_config(_table(request))
        groups = read_clients(
            replace(config.data, source=find_source(self.data), path=str(self.data))
        )
        train = groups.get("train") or groups["all"]
        labels = [int(c.y.max()) for c in train if c.y is not None and len(c)]
        sums = combine(ChannelSums.of(client.x) for client in train)
        return {
            "shape": list(train[0].x.shape[1:]),
            "dtype": "uint8" if train[0].x.dtype == torch.uint8 else "float32",
            "classes": max(labels, default=-1) + 1,
            "class_names": list(groups.class_names),
            "columns": list(groups.columns),
            "count": sums.count,
            "total": sums.total.tolist(),
            "squares": sums.squares.tolist(),
        }

    def _begin(self, request: str, start: bytes) -> Answer:
        as_one = "clients" in self.settings.withhold
        self.stage = stage = NodeStage(_table(request), start, self.data, as_one)
        many, known = len(stage.clients), "labels" not in self.settings.withhold
        labeled = [client.labeled for client in stage.clients]
        if stage.as_one:
            many, labeled = 1, [any(labeled)]
        self._say(
            f"stage {stage.number}: {len(stage.clients)} clients here, method "
            f"'{stage.config.method.name}'"
        )
        return {
            "version": __version__,
            "sha256": stage.spec.expansion_sha256,
            "clients": many,
            "labeled": labeled if known else None,
        }

    def _calibrate(self, task: bytes) -> Answer:
        stage = self._stage()
        self.fitting = NodeFitting(stage.calibrating(task), stage.as_one)
        return {"labeled": self.fitting.clients is not None}

    def _keep(self, data: bytes) -> Answer:
        stage = self._stage()
        task = stage.read(data)
        state = ServerState(
            task.round,
            task.psi,
            {},
            stage.method.server_state(),
            correction=strip_prefix(task.broadcast, PREFIX),
            start=stage.start,
        )
        save_checkpoint(self.kit / "federation", stage.spec, state)
        write_json(self.kit / "federation" / DATA_FILE, plain(stage.config)["data"])
        written = write_models(self.kit, stage.clients)
        self._say(f"round {task.round}: {len(written)} models in {self.kit / 'models'}")
        return {}


def _check_caller() -> None:
    """Refuse calls of other nodes, which FLARE would let through."""
    context = get_call_context()
    if context is not None and context.caller != _COORDINATOR:
        raise MessageError(f"node '{context.caller}' calls this one, and only the coordinator may")


def _table(request: str) -> dict[str, Any]:
    if len(request) > _MOST_REQUEST:
        raise MessageError(f"a request has {len(request):,} characters: drop it")
    try:
        return read_object(request.encode())
    except ValueError as error:
        raise MessageError(f"a request is malformed ({error}): drop it") from None
