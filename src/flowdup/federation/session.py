"""An administrator's session with the coordinator's server: who is there, jobs in and out."""

import io
import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import (
    AuthorizationError,
    InternalError,
    JobNotFound,
    JobNotRunning,
    NoConnection,
    NoReply,
)
from nvflare.fuel.flare_api.flare_api import new_secure_session

from flowdup.errors import FederationError
from flowdup.federation.provision import NODE_CLASSES, SERVER_CLASSES

_NO_SERVER = (NoConnection, NoReply, InternalError, OSError)
_FRESH = 11.0  # seconds since a node's last sign; it gives one every 2
_SYNC_SECONDS = 90  # for all nodes to start the process of a job


class Session:
    """What can be asked of the server; made by `session`."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def connected(self) -> dict[str, float]:
        """Nodes that gave a sign of life just now, and when."""
        found = {
            client.name: client.last_connect_time or 0.0
            for client in self._session.get_system_info().client_info
        }
        return {name: last for name, last in found.items() if time.time() - last < _FRESH}

    def submit(self, job: Path) -> str:
        """Submit a job's folder; FederationError if the certificate has no right to."""
        try:
            return str(self._session.submit_job(str(job.resolve())))
        except AuthorizationError:
            raise FederationError(
                "this certificate has no right to submit jobs: use that of the coordinator"
            ) from None

    def is_over(self, job: str) -> bool:
        """Whether FLARE has ended a job, however."""
        status = str(self._session.get_job_meta(job).get("status", ""))
        return status.startswith("FINISHED") or status.startswith("FAILED")

    def why_not_started(self, job: str) -> list[str]:
        """What the server and nodes said when they were given a job, apart from yes."""
        told = self._session.get_job_meta(job).get("job_deploy_detail", [])
        return [line for line in told if not line.endswith(": OK")]

    def abort(self, job: str) -> None:
        """End a job; after a crash it may be listed and not run, which is no error."""
        try:
            self._session.abort_job(job)
        except (InternalError, JobNotFound, JobNotRunning):
            return

    def abort_all(self) -> None:
        """End jobs that a killed `run` has left."""
        for job in self._session.list_jobs():
            if job.get("status") in ("RUNNING", "SUBMITTED", "DISPATCHED", "APPROVED"):
                self.abort(job["job_id"])


@contextmanager
def session(kit: Path, timeout: float = 15.0) -> Iterator[Session]:
    """A session with the certificate in an administrator's kit; always closed, for its threads
    would keep the process.  FederationError if there is no server.
    """
    logging.getLogger("nvflare").setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()):  # it greets
            found = new_secure_session(kit.name, str(kit.resolve()), timeout=timeout)
    except _NO_SERVER as error:
        raise FederationError(
            f"the coordinator's server does not answer ({type(error).__name__}): start it with "
            "`flowdup federation start`"
        ) from None
    try:
        yield Session(found)
    except _NO_SERVER as error:
        raise FederationError(
            f"the coordinator's server is gone ({type(error).__name__}): start it again, and go on "
            "with `flowdup federation run ... --resume`"
        ) from None
    finally:
        found.close()


def write_job(to: Path, folder: Path, nodes: Iterable[str], minimum: int) -> None:
    """FLARE's description of a job: two classes on each side, and no code."""
    controller, coordinator = SERVER_CLASSES
    executor, node = NODE_CLASSES
    args = {"server_obj_id": "coordinator", "sync_task_timeout": _SYNC_SECONDS}
    server = {
        "format_version": 2,
        "workflows": [{"id": "controller", "path": controller, "args": args}],
        "components": [
            {"id": "coordinator", "path": coordinator, "args": {"folder": str(folder.resolve())}}
        ],
    }
    client = {
        "format_version": 2,
        "executors": [
            {
                "tasks": ["*"],
                "executor": {"id": "executor", "path": executor, "args": {"client_obj_id": "node"}},
            }
        ],
        "components": [{"id": "node", "path": node, "args": {}}],
    }
    meta = {
        "name": "flowdup",
        "resource_spec": {},
        "deploy_map": {"server": ["server"], "node": list(nodes)},
        "min_clients": minimum,
        "mandatory_clients": [],
    }
    shutil.rmtree(to, ignore_errors=True)
    for name, content in (
        ("meta.json", meta),
        ("server/config/config_fed_server.json", server),
        ("node/config/config_fed_client.json", client),
    ):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_text(json.dumps(content, indent=2))
