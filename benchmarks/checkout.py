"""Runs a module of a checkout of flowdup in a process: of this one, or of another (`--against`)."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
# An installed flowdup could come first unnoticed, so the process itself looks where it is.
START = """
import runpy, sys
from pathlib import Path
import flowdup
home, module = Path(sys.argv.pop(1)), sys.argv.pop(1)
found = Path(flowdup.__file__).resolve()
if not found.is_relative_to(home):
    raise SystemExit(f"flowdup is {found.parent}, not in {home}")
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def command(home: Path, module: str, *arguments: str) -> list[str]:
    """`python -m MODULE ARGUMENTS` with the checkout's code; needs its environment, too."""
    return [sys.executable, "-P", "-c", START, str(home), module, *arguments]


def environment(home: Path) -> dict[str, str]:
    paths = [str(home / "benchmarks"), str(home / "src"), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return found if home == HERE else found | {"FLOWDUP_COMMIT": commit(home)}


def commit(home: Path) -> str:
    """Of another checkout; FLOWDUP_COMMIT_BEFORE names it where a copy has no history."""
    if told := os.environ.get("FLOWDUP_COMMIT_BEFORE"):
        return told
    if not (home / ".git").exists():
        return "unknown"
    words = ["git", "-C", str(home), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
