"""Torture runs and write what came of it; exit code 1 if a run ended in other bits."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from flowdup.files import write_atomic
from flowdup.provenance import provenance
from torture.comparison import comparison
from torture.crowds import full_disk, threads, writers
from torture.kills import kills
from torture.runs import Result, prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--only", default="", help="one part")
    chosen = parser.parse_args()
    start, results = time.monotonic(), dict[str, Result]()
    with TemporaryDirectory() as folder:
        home, processes = Path(folder), os.cpu_count() or 1
        works = prepare(home)
        parts: dict[str, Callable[[], Result]] = {
            "kills": lambda: kills(works, home, chosen.kills, processes),
            "writers": lambda: writers(works, home, chosen.pairs, processes),
            "full_disk": lambda: full_disk(works, home, 15),
            "threads": lambda: threads(works, home, 8, 5),
            "comparison": lambda: comparison(home),
        }
        for name, part in parts.items():
            if chosen.only in ("", name):
                begin = time.monotonic()
                results[name] = part() | {"seconds": round(time.monotonic() - begin, 1)}
                print(name, json.dumps(results[name]), flush=True)
    deviations = sum(len(result["deviations"]) for result in results.values())
    told = {"deviations": deviations, "seconds": round(time.monotonic() - start, 1)}
    about = provenance(torch.device("cpu"))
    print(json.dumps(told))
    if chosen.out:
        write_atomic(chosen.out, (json.dumps(told | results | about, indent=2) + "\n").encode())
    sys.exit(int(deviations > 0))


if __name__ == "__main__":
    main()
