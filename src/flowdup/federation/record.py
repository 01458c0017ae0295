"""What a federation remembers: refusals and suspensions, rounds, psi that were sent out with noise,
and which clients a node has.

The record is ours: FLARE's status of a job says nothing of rounds, and is not asked.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flowdup.engines import Roster
from flowdup.errors import CheckpointError
from flowdup.federation.folder import FederationFolder, read_json, write_json
from flowdup.files import write_atomic
from flowdup.params import Params, digest
from flowdup.privacy import Draw, PrivateRounds

MOST_REFUSALS = 3  # after which a node is suspended


def _now() -> float:
    return round(time.time(), 3)


@dataclass
class NodeRecord:
    """Refused messages by node, and who is suspended; stored at once."""

    folder: FederationFolder

    def refuse(self, node: str, round: int, reason: str) -> bool:
        """Note a refusal; True if the node is suspended now."""
        table = read_json(self.folder.nodes)
        own = table.setdefault(node, {"refusals": [], "suspended": False})
        own["refusals"].append({"round": round, "reason": reason, "time": _now()})
        own["suspended"] = own["suspended"] or len(own["refusals"]) >= MOST_REFUSALS
        write_json(self.folder.nodes, table)
        return bool(own["suspended"])

    def suspend(self, node: str) -> None:
        """Leave a node out until it is readmitted."""
        table = read_json(self.folder.nodes)
        table.setdefault(node, {"refusals": []})["suspended"] = True
        write_json(self.folder.nodes, table)

    def readmit(self, node: str) -> None:
        """Forget a node's refusals."""
        table = read_json(self.folder.nodes)
        table.pop(node, None)
        write_json(self.folder.nodes, table)

    @property
    def suspended(self) -> list[str]:
        """Nodes that are left out."""
        return [n for n, own in read_json(self.folder.nodes).items() if own["suspended"]]

    def refusals(self, node: str) -> list[dict[str, Any]]:
        """Of a node: round, reason and time of each."""
        found: list[dict[str, Any]] = read_json(self.folder.nodes).get(node, {}).get("refusals", [])
        return found


@dataclass(frozen=True)
class RoundRecord:
    """Who did what in a round, and what it weighed."""

    round: int
    asked: list[str]
    answered: list[str]
    missing: dict[str, str]  # why, by node
    refused: dict[str, str]
    clients: int  # whose replies are in the mean
    bytes_down: dict[str, int]  # by node
    bytes_up: dict[str, int]
    seconds: float
    time: float = field(default_factory=_now)


def append_round(run: Path, record: RoundRecord) -> None:
    """One line more in run/rounds.jsonl; a round that was repeated has several."""
    with open(run / "rounds.jsonl", "a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_rounds(run: Path) -> list[dict[str, Any]]:
    """One for each round, the latest where it was repeated; a last line half written is left."""
    path = run / "rounds.jsonl"
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["round"]] = row
    return [found[number] for number in sorted(found)]


def note_release(run: Path, round: int, psi: Params, draw: PrivateRounds) -> list[PrivateRounds]:
    """One line more in run/releases.jsonl, durably, unless this very psi is there already; the
    draws of other ones that are there for the round.
    """
    path, sha256 = run / "releases.jsonl", digest(psi).hex()
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [row for row in map(json.loads, lines) if row["round"] == round]
    if all(row["psi_sha256"] != sha256 for row in rows):
        row = {"round": round, "psi_sha256": sha256, "noise": draw.noise, "parts": draw.parts}
        content = "".join(f"{line}\n" for line in [*lines, json.dumps(row)])
        write_atomic(path, content.encode())
    return [
        PrivateRounds(row["noise"], tuple(Draw(*part) for part in row["parts"]), 1)
        for row in rows
        if row["psi_sha256"] != sha256
    ]


@dataclass
class ClientBook:
    """Which numbers a node's clients have in a run; given once, so that a cohort stays the same
    whoever is there when the run goes on.
    """

    path: Path
    table: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, run: Path) -> "ClientBook":
        """Of a run, empty before its first job."""
        path = run / "nodes.json"
        return cls(path, read_json(path))

    def enter(self, node: str, clients: int, labeled: list[bool] | None) -> None:
        """Give numbers to a node's clients; CheckpointError if it had others in this run."""
        known = self.table.get(node)
        if known is None:
            first = sum(own["clients"] for own in self.table.values())
            self.table[node] = {"first": first, "clients": clients, "labeled": labeled}
            write_json(self.path, self.table)
        elif (known["clients"], known["labeled"]) != (clients, labeled):
            raise CheckpointError(
                f"node '{node}' has other clients or labels than when it joined this run: restore "
                "its data, or start another run"
            )

    def locate(self, client: int) -> tuple[str, int]:
        """The node that has a client, and the client's number there."""
        for node, own in self.table.items():
            if own["first"] <= client < own["first"] + own["clients"]:
                return node, client - own["first"]
        raise KeyError(client)

    def roster(self, nodes: list[str]) -> Roster:
        """The clients of these nodes; one whose labels are withheld counts as unlabeled.  Those of
        others that have joined are away.
        """
        groups: dict[bool, list[int]] = {True: [], False: []}
        away = sum(own["clients"] for node, own in self.table.items() if node not in nodes)
        for node, own in self.table.items():
            if node in nodes:
                flags = own["labeled"] or [False] * own["clients"]
                for number, labeled in enumerate(flags, own["first"]):
                    groups[labeled].append(number)
        return Roster(np.array(groups[True], np.int64), np.array(groups[False], np.int64), away)
