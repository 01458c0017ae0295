"""How much memory this process may use, asked before something large is allocated."""

import os
import resource
from pathlib import Path

from flowdup.errors import ConfigError, FlowdupError

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SHARE = 0.5  # of the memory that one thing may take


def memory_limit() -> int:
    """Bytes: the machine's memory, or less where a container or a resource limit says so."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, _CGROUPS):
        text = path.read_text().strip() if path.is_file() else ""
        limits += [int(text)] if text.isdigit() else []
    return min([*limits, *_resource_limits()])


def _resource_limits() -> list[int]:
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    found = [resource.getrlimit(kind)[0] for kind in kinds]
    return [limit for limit in found if limit != resource.RLIM_INFINITY]


def check_memory(
    needed: int, what: str, remedy: str, error: type[FlowdupError | ValueError] = ConfigError
) -> None:
    """Refuse what needs more bytes than half of the memory; `what` begins the sentence."""
    if needed > _SHARE * (limit := memory_limit()):
        raise error(f"{what} needs {_size(needed)} of memory, of {_size(limit)} in all: {remedy}")


def _size(count: int) -> str:
    if count >= 2**70:
        return "far too many bytes"
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
