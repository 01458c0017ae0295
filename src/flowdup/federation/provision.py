"""Provisioning: the authority, certificates, and one kit per node, by FLARE's own tool.

A node's kit lets FLARE run nothing but flowdup's own node: code in jobs is refused there, and only
two classes may be made, so that whoever holds the coordinator cannot run programs at nodes.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from flowdup.errors import ConfigError, FlowdupError
from flowdup.federation.folder import ADMIN, NODES_ORG, VIEWER, FederationFolder, FederationNames
from flowdup.federation.kit import seal_kit
from flowdup.files import write_atomic

_PROJECT = "flowdup"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")  # FLARE takes no more
_HEART_BEAT = 12  # seconds of silence after which the coordinator counts a node as gone
_MOST_NODES = 1000
SERVER_CLASSES = (
    "nvflare.collab.runtime.controller.CollabController",
    "flowdup.federation.coordinator.Coordinator",
)
NODE_CLASSES = (
    "nvflare.collab.runtime.executor.CollabExecutor",
    "flowdup.federation.node.Node",
)


def init_federation(folder: FederationFolder, names: FederationNames) -> None:
    """Make the authority and all kits; ConfigError if the folder is taken or a name is odd."""
    if folder.path.exists() and any(folder.path.iterdir()):
        raise ConfigError(f"{folder.path} is not empty: choose another folder")
    _check_names(names)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.authority.mkdir(mode=0o700)
    project = folder.authority / "project.yml"
    write_atomic(project, json.dumps(_project(names)).encode())  # JSON is YAML
    made = _provision(folder, [])
    _move(made / names.host, folder.coordinator)
    _move(made / ADMIN, folder.admin)
    _move(made / VIEWER, folder.viewer)
    _set_up_coordinator(folder)
    for node in names.nodes:
        _make_kit(folder, made / node, node)
    shutil.rmtree(made)
    folder.write_names(names)


def add_node(folder: FederationFolder, node: str) -> Path:
    """A kit for one more node, under the same authority; the other kits stay as they are."""
    names = folder.read_names()
    grown = FederationNames(names.host, names.port, (*names.nodes, node))
    _check_names(grown)
    extra = folder.authority / f"add-{node}.yml"
    write_atomic(extra, json.dumps({"name": node, "org": NODES_ORG}).encode())
    made = _provision(folder, ["--add_client", extra.name])
    _make_kit(folder, made / node, node)
    shutil.rmtree(made)
    project = folder.authority / "project.yml"
    write_atomic(project, json.dumps(_project(grown)).encode())
    folder.write_names(grown)
    return folder.kit(node)


def _check_names(names: FederationNames) -> None:
    if not 0 < len(names.nodes) <= _MOST_NODES:
        raise ConfigError(f"a federation has 1 to {_MOST_NODES} nodes: name them with --nodes")
    if odd := [n for n in names.nodes if not _NAME.fullmatch(n) or n == names.host]:
        raise ConfigError(
            f"a node cannot be named '{odd[0]}': use small letters, digits and '-', and not the "
            "host's name"
        )
    if twice := [n for n in names.nodes if names.nodes.count(n) > 1]:
        raise ConfigError(f"there are two nodes named '{twice[0]}': give each a name of its own")
    if not 0 < names.port < 2**16:
        raise ConfigError(f"there is no port {names.port}: choose one from 1 to 65535")


def _project(names: FederationNames) -> dict[str, Any]:
    """FLARE's description of who takes part and what is made for them."""
    endpoint = {"sp_end_point": f"{names.host}:{names.port}"}
    agent = {
        "path": "nvflare.ha.dummy_overseer_agent.DummyOverseerAgent",
        "overseer_exists": False,
        "args": endpoint,
    }
    impl = "nvflare.lighter.impl"
    files = {"config_folder": "config", "require_signed_jobs": True, "overseer_agent": agent}
    return {
        "api_version": 3,
        "name": _PROJECT,
        "description": "a federation of flowdup",
        "participants": [
            {
                "name": names.host,
                "type": "server",
                "org": "coordinator",
                "fed_learn_port": names.port,
            },
            *({"name": node, "type": "client", "org": NODES_ORG} for node in names.nodes),
            {"name": ADMIN, "type": "admin", "org": "coordinator", "role": "lead"},
            {"name": VIEWER, "type": "admin", "org": "coordinator", "role": "member"},
        ],
        "builders": [
            {"path": f"{impl}.workspace.WorkspaceBuilder"},
            {"path": f"{impl}.static_file.StaticFileBuilder", "args": files},
            {"path": f"{impl}.cert.CertBuilder"},
            {"path": f"{impl}.signature.SignatureBuilder"},
        ],
    }


def _provision(folder: FederationFolder, more: list[str]) -> Path:
    """Run FLARE's tool in a process of its own, since it prints; the folder that it has made."""
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "made"]
    command.append("--force")  # it may go on in a folder that it has made before
    done = subprocess.run(
        [*command, *more], cwd=folder.authority, capture_output=True, text=True, check=False
    )
    made = sorted((folder.authority / "made" / _PROJECT).glob("prod_*"))
    if done.returncode or not made:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise FlowdupError(f"FLARE cannot make certificates ({' '.join(last)}): check the names")
    return made[-1]


def _move(made: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(made, to)
    for key in to.glob("startup/*.key"):
        key.chmod(0o600)


def _make_kit(folder: FederationFolder, made: Path, node: str) -> None:
    kit = folder.kit(node)
    _move(made, kit)
    table = _load(kit, "resources.json.default")
    table["class_allow_list"] = list(NODE_CLASSES)
    table["allow_log_streaming"] = False
    table["components"] = [c for c in table["components"] if c["id"] != "site_log_streamer"]
    _store(kit, "resources.json", table)
    _quiet(kit)
    _restrict(kit)
    seal_kit(kit, node, folder.authority / "made" / _PROJECT / "state" / "cert.json")


def _set_up_coordinator(folder: FederationFolder) -> None:
    kit = folder.coordinator
    table = _load(kit, "resources.json.default")
    table["class_allow_list"] = list(SERVER_CLASSES)
    table["servers"][0] |= {"heart_beat_timeout": _HEART_BEAT, "max_num_clients": _MOST_NODES}
    store = kit.resolve() / "store"  # not in the system's folder for temporary files
    storage = table["snapshot_persistor"]["args"]["storage"]["args"]
    storage["root_dir"] = str(store / "snapshots")
    for component in table["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(store / "jobs")
        if component["id"] == "job_scheduler":
            component["args"]["max_jobs"] = 10  # one that is slow to end holds up no other
    _store(kit, "resources.json", table)
    _quiet(kit)
    _restrict(kit)


def _quiet(kit: Path) -> None:
    """FLARE's many lines go to files in the kit; standard output is for ours."""
    table = _load(kit, "log_config.json.default")
    kept = [h for h in table["loggers"]["root"]["handlers"] if h in ("logFileHandler",)]
    table["loggers"]["root"]["handlers"] = kept
    table["handlers"] = {name: table["handlers"][name] for name in kept}
    _store(kit, "log_config.json", table)


def _restrict(kit: Path) -> None:
    """Nobody may send code or run shell commands; a member may look and no more."""
    rights = {"submit_job": "any", "manage_job": "any", "view": "any", "operate": "any"}
    none = {"byoc": "none", "shell_commands": "none", "server-predeployed-flwr": "none"}
    roles = {"project_admin": rights | none, "lead": rights | none, "member": {"view": "any"}}
    table = {"format_version": "1.0", "permissions": roles | {"org_admin": {"view": "any"}}}
    _store(kit, "authorization.json", table)


def _load(kit: Path, name: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((kit / "local" / name).read_text())
    return table


def _store(kit: Path, name: str, table: dict[str, Any]) -> None:
    write_atomic(kit / "local" / name, json.dumps(table, indent=2).encode())
