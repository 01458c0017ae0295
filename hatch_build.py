"""Packages know the commit that they were built from: flowdup/commit.txt, if there is a history."""

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable" or not (root / ".git").exists():  # else git finds another's
            return
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        self.folder = TemporaryDirectory()
        file = Path(self.folder.name) / "commit.txt"
        file.write_text(done.stdout)
        package = "flowdup" if self.target_name == "wheel" else "src/flowdup"
        build_data["force_include"][str(file)] = f"{package}/commit.txt"
