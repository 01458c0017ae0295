"""Fuzzing: `make fuzz`, 10,000 changed files of every kind and settings of every name.

Each case runs in a worker with a limit on memory and 5 seconds.  Right is what flowdup accepts, or
refuses with an error of its own; wrong is a foreign error, a hang, a worker that dies.  The same
seed gives the same cases in any number of workers; `--only KIND --case N` repeats one.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch

from flowdup.files import write_atomic
from flowdup.provenance import provenance
from fuzz.bench import Bench
from fuzz.cases import KINDS, PLANTED
from fuzz.corpus import make_corpus
from fuzz.workers import MEMORY, Worker, run_case


def fuzz(
    seed: int, cases: list[tuple[str, int]], source: Path, workers: int, seconds: float
) -> list[Any]:
    waiting, done, lock = iter(cases), [], threading.Lock()

    def serve() -> None:
        worker = Worker(seed, source, seconds)
        while True:
            with lock:
                case = next(waiting, None)
            if case is None:
                return worker.stop()
            found = worker.run(*case) | {"kind": case[0], "case": case[1]}
            with lock:
                done.append(found)
                if found["answer"] == "failed":
                    print(f"{case[0]} {case[1]}: {found['why'].strip().splitlines()[-1]}")
                if len(done) % 1000 == 0:
                    print(f"{len(done):,} cases", flush=True)

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def summary(done: list[Any], seed: int, seconds: float, limit: float) -> dict[str, Any]:
    kinds = {}
    for kind in sorted({found["kind"] for found in done}):
        mine = [found for found in done if found["kind"] == kind]
        counts = Counter(found["answer"] for found in mine)
        slowest = max(found["seconds"] for found in mine)
        answers = {a: counts[a] for a in ("refused", "accepted", "failed")}
        kinds[kind] = {"cases": len(mine)} | answers | {"slowest_seconds": round(slowest, 2)}
    failures = sorted((f for f in done if f["answer"] == "failed"), key=lambda f: f["kind"])
    return {
        "cases": len(done),
        "failures": len(failures),
        "seed": seed,
        "seconds": round(seconds, 1),
        "limits": {"seconds": limit, "memory_bytes": MEMORY},
        "slowest_seconds": round(max(found["seconds"] for found in done), 2),
        "peak_bytes": max(found["peak"] for found in done),
        "kinds": kinds,
        "failed": [{key: f[key] for key in ("kind", "case", "why")} for f in failures[:50]],
        **provenance(torch.device("cpu")),
    }


def chosen(count: int, only: str, planted: bool) -> list[tuple[str, int]]:
    """So many cases, shared among the kinds, in an order that mixes them."""
    kinds = PLANTED if planted else KINDS
    whole = sum(share for _, share in kinds.values())
    sizes = {kind: max(1, count * share // whole) for kind, (_, share) in kinds.items()}
    cases = [(kind, i) for kind, size in sizes.items() if only in kind for i in range(size)]
    Random(0).shuffle(cases)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--only", default="", help="kinds whose names have this in them")
    parser.add_argument("--case", type=int, help="repeat this one, here, with its traceback")
    parser.add_argument("--seconds", type=float, default=5.0, help="that a case may take")
    parser.add_argument("--planted", action="store_true", help="failures, to see them reported")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source = Path(tempfile.mkdtemp(prefix="fuzz-corpus-"))
    try:
        make_corpus(source)
        if arguments.case is not None:
            bench = Bench(source, source / "scratch" / "case")
            kind = next(kind for kind in KINDS if arguments.only in kind)
            print(json.dumps(run_case(arguments.seed, kind, arguments.case, bench), indent=2))
            return
        start = time.monotonic()
        cases = chosen(arguments.cases, arguments.only, arguments.planted)
        done = fuzz(arguments.seed, cases, source, arguments.workers, arguments.seconds)
        found = summary(done, arguments.seed, time.monotonic() - start, arguments.seconds)
    finally:
        shutil.rmtree(source, ignore_errors=True)
    for kind, row in found["kinds"].items():
        print(f"{kind:48} {row}")
    print(f"{found['cases']:,} cases in {found['seconds']} s, {found['failures']} failures")
    if arguments.out:
        write_atomic(arguments.out, json.dumps(found, indent=2).encode())
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
