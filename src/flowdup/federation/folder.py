"""The files of a federation's folder at the coordinator, and of a kit at a node.

federation.json    names: the host and port of the coordinator, and the nodes in order
authority/         the authority that signs certificates, with its private key: keep it off line
coordinator/       the coordinator's own kit, where FLARE also keeps its logs and jobs
admin/             the certificate that may submit jobs; viewer/ has one that may only look
kits/NODE/         what a node is given, to be handed over and then deleted here
nodes.json         who is suspended, and every refusal
refused.json       connections and commands that the server turned away, counted by reason
run/               the run folder (`run/folder.py`), with rounds.jsonl, releases.jsonl, nodes.json
request.json       what the coordinator's job is to do; written by `flowdup federation run`
job.json           which nodes the running job has; written by the job
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowdup.errors import ConfigError
from flowdup.files import write_atomic
from flowdup.strict_json import get_count, get_text, get_texts, read_object

ADMIN, VIEWER = "admin@flowdup.org", "viewer@flowdup.org"
NODES_ORG = "nodes"  # the organization that certificates of nodes name, and no others
KIT_FILE = "kit.json"


@dataclass(frozen=True)
class FederationNames:
    """Who belongs to a federation."""

    host: str  # of the coordinator, as nodes reach it and as its certificate names it
    port: int
    nodes: tuple[str, ...]  # in the order in which their clients are numbered


@dataclass(frozen=True)
class FederationFolder:
    """The coordinator's files; none of them needs to exist."""

    path: Path

    @property
    def names(self) -> Path:
        """The file with host, port and nodes."""
        return self.path / "federation.json"

    @property
    def authority(self) -> Path:
        """The authority's own files, with its private key."""
        return self.path / "authority"

    @property
    def coordinator(self) -> Path:
        """The server's kit, and its logs and jobs."""
        return self.path / "coordinator"

    @property
    def admin(self) -> Path:
        """The kit of who may submit jobs."""
        return self.path / "admin" / ADMIN

    @property
    def viewer(self) -> Path:
        """The kit of who may look."""
        return self.path / "viewer" / VIEWER

    @property
    def nodes(self) -> Path:
        """The file of refusals and suspensions."""
        return self.path / "nodes.json"

    @property
    def refused(self) -> Path:
        """The file in which the server counts whom it turned away."""
        return self.path / "refused.json"

    @property
    def request(self) -> Path:
        """The file that says what the job is to do."""
        return self.path / "request.json"

    @property
    def job(self) -> Path:
        """The file in which the running job says how it fares."""
        return self.path / "job.json"

    @property
    def stop(self) -> Path:
        """Asks the running job to end after the round in hand."""
        return self.path / "stop"

    @property
    def log(self) -> Path:
        """What the coordinator says for people, line by line."""
        return self.path / "federation.log"

    def kit(self, node: str) -> Path:
        """What a node is given."""
        return self.path / "kits" / node

    def read_names(self) -> FederationNames:
        """ConfigError if the folder holds no federation."""
        try:
            table = read_object(self.names.read_bytes())
            return FederationNames(
                get_text(table, "host"), get_count(table, "port"), get_texts(table, "nodes")
            )
        except (OSError, ValueError):
            raise ConfigError(
                f"{self.path} is no folder of a federation: make one with `flowdup federation init`"
            ) from None

    def write_names(self, names: FederationNames) -> None:
        """Store them."""
        write_json(self.names, asdict(names))


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole."""
    write_atomic(path, json.dumps(value, indent=2).encode())


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote; empty where there is no file."""
    return read_object(path.read_bytes()) if path.is_file() else {}
