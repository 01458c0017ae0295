"""Processes that run cases under a limit on memory and time, and are replaced when they fail."""

import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import torch

from flowdup import evaluate_run
from flowdup.errors import FlowdupError
from fuzz.bench import Bench
from fuzz.cases import KINDS, PLANTED

MEMORY = 3 * 2**30  # bytes of data that a worker may have, which flowdup reads as its machine's
LONGEST = 2000  # letters of a sentence


def run_case(seed: int, kind: str, number: int, bench: Bench) -> dict[str, Any]:
    """What came of one case, in a word, and why if it failed."""
    random = Random(f"{seed}/{kind}/{number}")
    start = time.monotonic()
    answer, why = "accepted", ""
    try:
        with warnings.catch_warnings(action="ignore"):
            (KINDS | PLANTED)[kind][0](random, bench)
    except FlowdupError as error:
        answer, sentence = "refused", str(error)
        if len(sentence) > LONGEST or not sentence.strip():
            answer, why = "failed", f"a sentence of {len(sentence)} letters: {sentence[:200]}"
    except BaseException as error:  # what no user should see
        answer, why = "failed", "".join(traceback.format_exception(error))[-1500:]
    return {"answer": answer, "why": why, "seconds": time.monotonic() - start}


def work(seed: int, source: Path, pipe: Connection) -> None:
    """A worker: reads kinds and numbers of cases, answers each; ends when the pipe does."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        bench = Bench(source, Path(scratch) / "case")
        evaluate_run(bench.copy("run"))  # imports what is slow to import
        pipe.send(None)
        while (case := pipe.recv()) is not None:
            kind, number = case
            found = run_case(seed, kind, number, bench)
            found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            pipe.send(found)


class Worker:
    """A process that runs cases, replaced by another one when it hangs or dies."""

    def __init__(self, seed: int, source: Path, seconds: float) -> None:
        self.seed, self.source, self.seconds = seed, source, seconds
        self.start()

    def start(self) -> None:
        server = multiprocessing.get_context("forkserver")  # imports once, for all workers
        server.set_forkserver_preload(["fuzz.cases"])
        self.pipe, other = server.Pipe()
        arguments = (self.seed, self.source, other)
        self.process = server.Process(target=work, args=arguments, daemon=True)
        self.process.start()
        other.close()
        self.pipe.recv()

    def run(self, kind: str, number: int) -> dict[str, Any]:
        self.pipe.send((kind, number))
        start = time.monotonic()
        why = f"it took longer than {self.seconds} s"
        try:
            if self.pipe.poll(self.seconds + 1):  # the worker's own clock decides
                found: dict[str, Any] = self.pipe.recv()
                if found["seconds"] > self.seconds:
                    found |= {"answer": "failed", "why": why}
                return found
        except EOFError:
            why = "the process died"
        self.process.kill()
        self.process.join()
        self.start()
        return {"answer": "failed", "why": why, "seconds": time.monotonic() - start, "peak": 0}

    def stop(self) -> None:
        self.pipe.send(None)
        self.process.join(10)
