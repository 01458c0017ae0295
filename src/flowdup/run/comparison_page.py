"""The page of a comparison, from the folders of its runs."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowdup.report import ComparedRun, ComparedVariant, comparison_page
from flowdup.run.folder import ComparisonFolder, RunFolder
from flowdup.run.workers import Job
from flowdup.strict_json import read_lenient_json


def write_comparison_page(jobs: Sequence[Job], rows: Sequence[dict[str, Any]], out: Path) -> Path:
    """Write comparison.html beside the results and return its path; `rows` are from `collect`."""
    found = {(row["variant"], row["seed"]): row for row in rows}
    runs: dict[str, list[ComparedRun]] = {}
    missing = []
    for job in jobs:
        label = job.label or job.variant
        row = found.get((job.variant, job.config.seed))
        if row is None:
            missing.append(f"{label} (seed {job.config.seed})")
            continue
        runs.setdefault(label, []).append(
            ComparedRun(row, job.run.read_all(), _test_clients(job.run))
        )
    folder = ComparisonFolder(out)
    variants = [ComparedVariant(label, own) for label, own in runs.items()]
    folder.write_page(comparison_page(out.resolve().name, variants, missing))
    return folder.page


def _test_clients(run: RunFolder) -> str:
    """A digest of who is tested, with what data; empty if clients.json does not tell."""
    try:
        listing = read_lenient_json(run.clients.read_bytes())
    except (OSError, ValueError):
        return ""
    if not isinstance(listing, dict) or not listing.get("test"):
        return ""
    return hashlib.sha256(json.dumps(listing["test"], sort_keys=True).encode()).hexdigest()
