"""Personal models of a node's clients, made where their data are."""

import re
from collections.abc import Sequence
from pathlib import Path

from flowdup.data.clients import ClientData
from flowdup.data.data_config import DataConfig
from flowdup.data.given_clients import read_given_clients
from flowdup.errors import CheckpointError
from flowdup.federation.folder import read_json
from flowdup.federation.kit import Kit
from flowdup.personalize import load
from flowdup.settings import read_settings

DATA_FILE = "data.json"  # the run's settings of `data`, by which tables are read
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def write_models(kit: Path, clients: Sequence[ClientData]) -> list[Path]:
    """A model per client in KIT/models, from its unlabeled points and the psi in KIT/federation.

    A file is named after its client, or after its number where the name is no file name.
    """
    federation = load(kit / "federation")
    written = []
    for number, client in enumerate(clients):
        name = client.name if _PLAIN.fullmatch(client.name) else f"client-{number}"
        path = kit / "models" / f"{name}.safetensors"
        federation.personalize(client.x).save(path)
        written.append(path)
    return written


def personalize_node(kit: Kit, data: Path) -> list[Path]:
    """Models of all clients in the node's data, now; CheckpointError if it has no psi yet."""
    if not kit.federation.is_dir():
        raise CheckpointError(f"{kit.path} has no psi yet: take part in a round first")
    inputs = load(kit.federation).spec.inputs
    columns: DataConfig = read_settings(DataConfig, read_json(kit.federation / DATA_FILE))
    grouped = (data / "train").is_dir()
    clients = read_given_clients(data, columns, inputs, "train" if grouped else "")
    return write_models(kit.path, clients)
