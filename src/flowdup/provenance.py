"""Where a number was measured: device, versions, commit."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def provenance(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": _commit(),
    }


def _processor() -> str:
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _commit() -> str:
    """Of the source tree; FLOWDUP_COMMIT names it where a copy has no history."""
    if named := os.environ.get("FLOWDUP_COMMIT"):
        return named
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # installed: a repository around it is somebody else's
        return "unknown"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
