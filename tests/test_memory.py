"""How much memory there is, and what would not fit."""

import os
import resource
from pathlib import Path

import pytest

from flowdup import memory
from flowdup.errors import ConfigError


def test_the_least_of_machine_container_and_resource_limit_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(memory, "_CGROUPS", ())
    if resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY:
        assert memory.memory_limit() == machine  # no container, no limit
    for text, wanted in ((str(machine // 2), machine // 2), ("max", machine), ("", machine)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(memory, "_CGROUPS", (str(tmp_path / "memory.max"), "/nowhere"))
        assert memory.memory_limit() == wanted


def test_what_needs_more_than_half_of_it_is_refused() -> None:
    limit = memory.memory_limit()
    memory.check_memory(limit // 3, "this", "lower that")
    with pytest.raises(ConfigError, match=r"this .*: lower that"):
        memory.check_memory(limit, "this", "lower that")
