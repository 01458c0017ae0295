"""A whole federation on one machine, over loopback with mutual TLS: for the demo and for tests.

Every party is a process of its own, started by the same commands as on many machines.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import psutil

from flowdup.data.clients import ClientData
from flowdup.federation.folder import FederationFolder

_FLOWDUP = [sys.executable, "-m", "flowdup"]


class LocalFederation:
    """The processes of a federation in a folder; all are ended on leaving a `with` block."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, FederationFolder(root / "federation")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {"OMP_NUM_THREADS": "1"}  # nodes share the cores

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self.processes):
            self.kill(name)

    def command(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """A command's output, whatever its exit code."""
        return subprocess.run(
            [*_FLOWDUP, *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=self.environment,
        )

    def init(self, nodes: Sequence[str]) -> None:
        """Make kits for these nodes, with a port that is free."""
        names, port = ",".join(nodes), str(free_port())
        done = self.command(
            *("federation", "init", "--nodes", names, "--port", port),
            *("--out", str(self.folder.path)),
        )
        if done.returncode:
            raise RuntimeError(done.stderr)

    def start_server(self) -> None:
        """Start the coordinator's server and wait until it listens."""
        self.start("server", "federation", "start", str(self.folder.path))
        port, until = self.folder.read_names().port, time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
                return
            time.sleep(0.2)
        raise RuntimeError(f"no server: {self.output('server')}")

    def start_node(self, node: str, *more: str) -> None:
        """Start a node with the data in ROOT/data/NODE; `more` are words before `node`."""
        kit, data = self.folder.kit(node), self.root / "data" / node
        self.start(node, *more, "node", str(kit), "--data", str(data))

    def start(self, name: str, *words: str) -> None:
        """A command in the background, its output in a file."""
        with open(self.root / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [*_FLOWDUP, *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.environment,
            )

    def output(self, name: str) -> str:
        """All that a party has printed."""
        return (self.root / f"{name}.log").read_text()

    def wait(self, name: str, timeout: float) -> int:
        """The exit code of a command in the background."""
        return self.processes[name].wait(timeout)

    def kill(self, name: str) -> None:
        """End a party's processes with -9, those of its jobs first noted and ended too."""
        process = self.processes.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGKILL)
        process.kill()
        process.wait()


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
        return port


def write_clients(folder: Path, clients: Sequence[ClientData], prefix: str = "client") -> None:
    """One .npz file per client, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, client in enumerate(clients):
        arrays = {"x": client.x.numpy()}
        if client.y is not None:
            arrays["y"] = client.y.numpy()
        np.savez(folder / f"{prefix}-{number:03d}.npz", **arrays)  # type: ignore[arg-type]
