"""The long-lived processes of FLARE: the coordinator's server and a node's client.

Both replace the calling process, so that a supervisor such as systemd sees them directly.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from flowdup.federation.folder import NODES_ORG, FederationFolder, write_json
from flowdup.federation.kit import Kit
from flowdup.strict_json import get_text, get_texts, read_object

KIT_VARIABLE = "FLOWDUP_KIT"  # by which the process of a job finds the node's kit
WITHHELD = ("clients", "labels")  # what a node may keep to itself
_HEART_BEAT = 2  # seconds between a node's signs of life, by which it is seen to be back


def become_server(folder: FederationFolder) -> NoReturn:
    """Serve until the process is ended."""
    folder.read_names()
    _become("flowdup.federation.server", "fed_server.json", folder.coordinator, "org=coordinator")


def become_node(kit: Kit) -> NoReturn:
    """Take part until the process is ended."""
    os.environ[KIT_VARIABLE] = str(kit.path)
    module, name = "nvflare.private.fed.app.client.client_train", f"uid={kit.node}"
    beat = f"heart_beat_interval={_HEART_BEAT}"
    _become(module, "fed_client.json", kit.path, name, f"org={NODES_ORG}", beat)


@dataclass(frozen=True)
class NodeSettings:
    """What the process of a job needs to know of its node."""

    data: Path  # of the clients
    withhold: tuple[str, ...] = ()  # of `WITHHELD`, what is not told
    modules: tuple[str, ...] = ()  # that register a user's own models and methods
    secure: bool = False  # whether updates are sent in secure sums alone


def write_node_settings(kit: Kit, settings: NodeSettings) -> None:
    """Store them in the kit, where the process of a job finds them."""
    table = {"data": str(settings.data.resolve()), "withhold": settings.withhold}
    write_json(kit.settings, table | {"modules": settings.modules, "secure": settings.secure})


def read_node_settings(kit: Kit) -> NodeSettings:
    """What `write_node_settings` wrote."""
    table = read_object(kit.settings.read_bytes())
    return NodeSettings(
        Path(get_text(table, "data")),
        get_texts(table, "withhold"),
        get_texts(table, "modules"),
        table.get("secure") is True,
    )


def _become(module: str, config: str, workspace: Path, *settings: str) -> NoReturn:
    workspace = workspace.resolve()
    (workspace / "transfer").mkdir(exist_ok=True)
    for left in ("pid.fl", "shutdown.fl", "restart.fl"):
        (workspace / left).unlink(missing_ok=True)
    settings = ("secure_train=true", *settings, "config_folder=config")
    command = [sys.executable, "-u", "-m", module]
    os.chdir(workspace)  # some files of FLARE are named from here
    sys.stdout.flush()
    os.execv(sys.executable, [*command, "-m", str(workspace), "-s", config, "--set", *settings])
