"""Where a number was measured: device, versions, commit."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from flowdup.version import __version__

UNKNOWN = "unknown"


def provenance(device: torch.device) -> dict[str, Any]:
    """Where a result comes from: device, versions, commit."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "versions": {
            "flowdup": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "commit": commit(),
    }


def version_text() -> str:
    """flowdup's version, and the commit if it is known."""
    known = commit()
    return __version__ if known == UNKNOWN else f"{__version__} (commit {known})"


def _processor() -> str:
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def commit(package: Path = Path(__file__).parent) -> str:
    """Of the source tree that the package is in, or that it was built from (`hatch_build.py`);
    FLOWDUP_COMMIT names it where a copy has neither.
    """
    if named := os.environ.get("FLOWDUP_COMMIT"):
        return named
    built, root = package / "commit.txt", package.parents[1]
    if built.is_file():
        return built.read_text("utf-8").strip()
    if not (root / ".git").exists():  # installed: a repository around it is somebody else's
        return UNKNOWN
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return done.stdout.strip()
