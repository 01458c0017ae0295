"""What `flowdup federation status` tells: rounds, who is alive, bytes, refusals."""

from pathlib import Path
from typing import Any

from flowdup.errors import FederationError
from flowdup.federation.folder import FederationFolder, read_json
from flowdup.federation.kit import certificates_until
from flowdup.federation.record import NodeRecord, read_rounds
from flowdup.federation.session import session
from flowdup.run.folder import RunFolder


def federation_status(folder: FederationFolder, out: Path, ask: bool = True) -> dict[str, Any]:
    """From our own records, and who is connected by asking the server, unless told not to."""
    names, record, run = folder.read_names(), NodeRecord(folder), RunFolder(out)
    connected: list[str] | None = None
    if ask:
        try:
            with session(folder.admin, timeout=5.0) as current:
                connected = list(current.connected())
        except FederationError:
            connected = None  # no server: nobody can be
    rounds, metrics = read_rounds(out), run.read_metrics()
    book, suspended = read_json(out / "nodes.json"), record.suspended
    last = metrics[-1] if metrics else {}
    config = run.read_config() if run.config.is_file() else None
    rows = []
    for node in names.nodes:
        own = book.get(node, {})
        labeled = own.get("labeled")
        rows.append(
            {
                "node": node,
                "alive": None if connected is None else node in connected,
                "clients": own.get("clients"),
                "labeled_clients": None if labeled is None else sum(labeled),
                "last_round": max((r["round"] for r in rounds if node in r["answered"]), default=0),
                "missing_in": [r["round"] for r in rounds if node in r["missing"]],
                "bytes_down": sum(r["bytes_down"].get(node, 0) for r in rounds),
                "bytes_up": sum(r["bytes_up"].get(node, 0) for r in rounds),
                "refusals": record.refusals(node),
                "suspended": node in suspended,
            }
        )
    clients = sum(r["clients"] for r in rounds)
    up, down = (sum(sum(r[key].values()) for r in rounds) for key in ("bytes_up", "bytes_down"))
    return {
        "server": "unknown" if not ask else "down" if connected is None else "up",
        "round": last.get("round", 0),
        "rounds": config.rounds if config else None,
        "loss": last.get("loss"),
        "validation_accuracy": next(
            (m["validation_accuracy"] for m in reversed(metrics) if "validation_accuracy" in m),
            None,
        ),
        "bytes_up": up,
        "bytes_down": down,
        "bytes_up_per_client": round(up / clients) if clients else None,
        "bytes_down_per_client": round(down / clients) if clients else None,
        "certificates_until": certificates_until(folder.coordinator),
        "nodes": rows,
        "refused": read_json(folder.refused),
    }
