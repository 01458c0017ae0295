"""`flowdup federation run`: a chain of jobs until training is finished, whoever comes and goes.

A job begins with the nodes that are there.  When one comes back, or a new one joins, the job is
asked to end after the round in hand and the next begins with it; when a job dies, or too few nodes
answer, the next goes on from the last checkpoint.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowdup.config import Config
from flowdup.errors import ConfigError, FederationError
from flowdup.federation.calls import CallSettings
from flowdup.federation.coordinator import FAILED, FINISHED, request_table
from flowdup.federation.folder import FederationFolder, read_json, write_json
from flowdup.federation.record import NodeRecord
from flowdup.federation.session import Session, session, write_job
from flowdup.federation.settings import FederationSettings, check_federation
from flowdup.run.folder import RunFolder
from flowdup.settings import plain

_POLL_SECONDS = 1.0
_MOST_IDLE = 5  # jobs in a row without a round
_END_SECONDS = 20.0  # for FLARE to end a job whose work is done
_LOST_SECONDS = 3.0  # the same where a node was lost, for which it would wait minutes


@dataclass(frozen=True)
class RunRequest:
    """What to train, where to, and how to wait for nodes."""

    config: Config
    out: Path
    resume: bool = False
    wait_for: int = 0  # nodes to begin with; 0: all
    patience: float = 3600.0  # seconds to wait for enough nodes
    calls: CallSettings = field(default_factory=CallSettings)
    federation: FederationSettings = field(default_factory=FederationSettings)
    modules: tuple[str, ...] = ()


def run_federation(
    folder: FederationFolder, request: RunRequest, stop: Callable[[], bool]
) -> Iterator[str]:
    """Train and yield lines for people; returns when training is finished or `stop` says so."""
    names, out = folder.read_names(), RunFolder(request.out)
    check_federation(request.config, request.federation)
    if out.started and not request.resume:
        raise ConfigError(f"{out.path} holds a run already: add --resume, or name another --out")
    with ExitStack() as held:
        current = held.enter_context(session(folder.admin))
        current.abort_all()
        first, number, idle = request.wait_for or len(names.nodes), 0, 0
        deliveries = 0
        while not stop():
            nodes = yield from _wait(folder, current, min(first, len(names.nodes)), request, stop)
            if not nodes:
                return
            number, first = number + 1, request.federation.minimum
            before = out.count_rounds()
            job = _Job(folder, current, request, number, nodes)
            yield f"job {number} begins with {', '.join(nodes)}"
            yield from job.follow(stop)
            if job.outcome == FAILED:
                raise FederationError(f"the run stopped: {job.message}")
            if job.outcome == FINISHED:
                away = _without_psi(folder, current)
                if not away or deliveries == _MOST_IDLE:
                    return
                deliveries += 1
                yield f"training is finished; one more job brings psi to {', '.join(away)}"
                continue
            if job.message:
                yield job.message
            idle = 0 if out.count_rounds() > before else idle + 1
            if idle >= _MOST_IDLE:
                raise FederationError(f"{idle} jobs in a row did no round: {job.message}")


def _without_psi(folder: FederationFolder, current: Session) -> list[str]:
    """Nodes that are there and were not when training ended."""
    kept, suspended = read_json(folder.job).get("kept", []), NodeRecord(folder).suspended
    known = folder.read_names().nodes
    return [n for n in current.connected() if n in known and n not in (*kept, *suspended)]


def _wait(
    folder: FederationFolder,
    current: Session,
    enough: int,
    request: RunRequest,
    stop: Callable[[], bool],
) -> Any:
    """The nodes that are there, once they are enough; none if asked to stop."""
    told, until = "", time.monotonic() + request.patience
    while not stop():
        suspended = NodeRecord(folder).suspended
        order = folder.read_names().nodes
        connected = current.connected()
        nodes = [n for n in order if n in connected and n not in suspended]
        possible = len([n for n in order if n not in suspended])
        if possible < request.federation.minimum:
            raise FederationError(
                f"{possible} nodes are not suspended and {request.federation.minimum} are needed: "
                "readmit one with `flowdup federation readmit`"
            )
        if len(nodes) >= min(enough, possible):
            return nodes
        if time.monotonic() > until:
            raise FederationError(f"{len(nodes)} nodes are there and {enough} are needed")
        line = f"waiting for nodes: {len(nodes)} of {enough} are there"
        if line != told:
            told = line
            yield line
        time.sleep(_POLL_SECONDS)
    return []


class _Job:
    """A job in hand."""

    def __init__(
        self,
        folder: FederationFolder,
        current: Session,
        request: RunRequest,
        number: int,
        nodes: list[str],
    ) -> None:
        self.folder, self.current, self.nodes = folder, current, nodes
        self.outcome, self.message = "", ""
        table = request_table(
            number,
            plain(request.config),
            request.out,
            request.calls,
            request.federation,
            list(request.modules),
        )
        folder.stop.unlink(missing_ok=True)
        folder.job.unlink(missing_ok=True)
        write_json(folder.request, table)
        where = folder.path / "job"
        write_job(where, folder.path, nodes, request.federation.minimum)
        self.read = folder.log.stat().st_size if folder.log.exists() else 0
        self.id = current.submit(where)

    def follow(self, stop: Callable[[], bool]) -> Iterator[str]:
        """Lines of the job until it is over."""
        ended = 0.0  # when our part of the job ended
        while True:
            yield from self._lines()
            state = read_json(self.folder.job)
            self.outcome, self.message = state.get("outcome", ""), state.get("message", "")
            if self.outcome:
                ended = ended or time.monotonic()
                grace = _LOST_SECONDS if state.get("lost") else _END_SECONDS
                if time.monotonic() - ended > grace:  # FLARE waits long for a node that is dead
                    self.current.abort(self.id)
                    return
            if self.current.is_over(self.id):
                yield from self._lines()
                if not self.outcome:
                    told = "; ".join(self.current.why_not_started(self.id))
                    self.message = f"the job died ({told})" if told else "the job died"
                return
            if not self.outcome and (stop() or self._is_someone_back(state)):
                self.folder.stop.touch()
            time.sleep(_POLL_SECONDS)

    def _is_someone_back(self, state: dict[str, Any]) -> bool:
        taking_part = state.get("nodes")
        if taking_part is None:  # it has not begun
            return False
        left_out = (*taking_part, *NodeRecord(self.folder).suspended)
        known, lost_at = self.folder.read_names().nodes, state.get("lost_at", {})
        return any(
            node in known and node not in left_out and last > lost_at.get(node, 0.0)
            for node, last in self.current.connected().items()
        )

    def _lines(self) -> list[str]:
        if not self.folder.log.exists():
            return []
        with open(self.folder.log) as file:
            file.seek(self.read)
            lines = file.read()
        whole = lines[: lines.rfind("\n") + 1]
        self.read += len(whole.encode())
        return whole.splitlines()
