"""Plants every bug of the catalogue in a copy of the source and runs the tests that must catch it.

`make mutants` runs all; `make mutants MUTANTS="rate cohort"` those with one of these words in their
names.  Each test is first run on the source as it is, where it must pass.  The working tree is only
read.  Exit code 1 where more than one bug survives.

Importing torch takes seconds, so tests run in forks of a process that has imported it; flowdup is
imported after the fork, from the copy.
"""

import argparse
import compileall
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mutants.catalogue import ROOT, Mutant, read_catalogue

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
COPIED = ("src", "tests", "examples", "experiments", "pyproject.toml", "Makefile")
SPARED = 1  # how many may survive
IMPORTS = ("hypothesis", "sklearn.datasets", "torch._dynamo", "torch.utils.flop_counter", "typer")


@dataclass(frozen=True)
class Outcome:
    """What the tests of one process said."""

    failed: tuple[str, ...]  # ids of tests that failed
    passed: tuple[str, ...]
    seconds: float
    hung: bool = False
    broken: str = ""  # why nothing can be concluded: no test was collected, or the process died
    log: str = ""  # what pytest printed


@dataclass(eq=False)
class Recorder:
    """A plugin of pytest that writes down how each test ended."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(f"{report.nodeid} cannot be collected")


@dataclass(frozen=True)
class Process:
    """A fork that runs tests in a copy of the tree."""

    pid: int
    folder: Path
    started: float
    limit: float

    def poll(self) -> Outcome | None:
        """What its tests said once it has ended; None as long as it runs within its limit."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        seconds = time.monotonic() - self.started
        if not ended and seconds < self.limit:
            return None
        _kill(self.pid)  # and whatever its tests started
        if not ended:
            os.waitpid(self.pid, 0)
            return Outcome((), (), seconds, hung=True)
        found, log = self.folder / "outcome.json", (self.folder / "log").read_text()
        if not found.exists():
            return Outcome((), (), seconds, False, f"its process ended with {status}", log)
        told = json.loads(found.read_text())
        failed, passed, broken = (tuple(told[key]) for key in ("failed", "passed", "broken"))
        return Outcome(failed, passed, seconds, False, "; ".join(broken), log)


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def start(tests: Iterable[str], limit: float, pristine: Path, mutant: Mutant | None) -> Process:
    """Run tests in a fork, on a copy of the tree with the bug in it."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-", dir=pristine.parent))
    tree = folder / "tree"
    shutil.copytree(pristine, tree)
    if mutant:
        place = tree / mutant.path
        place.write_text(mutant.apply(place.read_text("utf-8")), "utf-8")
        for stale in (place.parent / "__pycache__").glob(f"{place.stem}.*.pyc"):
            stale.unlink()
    now = time.monotonic()
    pid = os.fork()
    if not pid:
        try:
            _run(list(tests), folder)
        finally:
            os._exit(1)
    return Process(pid, folder, now, limit)


def _run(tests: list[str], folder: Path) -> None:
    """In the fork: never returns."""
    os.setsid()
    tree = folder / "tree"
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree / "src")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    sys.path[:] = [str(tree / "src"), *(p for p in sys.path if not _in_root(p))]
    sys.modules["__main__"] = ModuleType("__main__")  # what a spawned process would import again
    recorder = Recorder()
    options = ["-x", "--override-ini=addopts=", "-pno:cacheprovider", "-pno:xdist", "-pno:cov"]
    code = pytest.main([*options, *tests], [recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        recorder.broken.append(f"pytest ended with {code!r}")
    told = {"passed": recorder.passed, "failed": recorder.failed, "broken": recorder.broken}
    (folder / "outcome.json").write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)


def _in_root(path: str) -> bool:
    """Whether an entry of the import path is the working tree's, where no bug is."""
    inside = Path(path or ".").resolve()
    return inside in (ROOT / "src", ROOT / "tests", ROOT)


Work = tuple[Any, tuple[str, ...], float, Mutant | None]  # a key, tests, their limit, a bug


def run_all(work: Iterable[Work], pristine: Path, jobs: int) -> Iterator[tuple[Any, Outcome]]:
    """So many forks at a time; the outcome of each by its key, as they end."""
    waiting, running = list(work), dict[Any, Process]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                key, tests, limit, mutant = waiting.pop(0)
                running[key] = start(tests, limit, pristine, mutant)
            for key, process in list(running.items()):
                if (outcome := process.poll()) is not None:
                    del running[key]
                    yield key, outcome
                    shutil.rmtree(process.folder, ignore_errors=True)
            time.sleep(0.02)
    finally:
        for process in running.values():
            _kill(process.pid)


def verdict(mutant: Mutant, outcome: Outcome) -> str:
    """caught, survived, or why neither can be said."""
    if outcome.broken:
        return f"broken: {outcome.broken}"
    return "caught" if outcome.failed or (outcome.hung and mutant.hangs) else "survived"


def copy_tree(target: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    compileall.compile_dir(target / "src", quiet=1)
    return target


def check_unmutated(chosen: list[Mutant], pristine: Path, jobs: int) -> None:
    """Exit unless every test passes on the source as it is."""
    limits: dict[str, float] = {}
    for mutant in chosen:
        for test in mutant.tests:
            limits[test] = max(limits.get(test, 0), mutant.seconds)
    share = [list(limits)[i::jobs] for i in range(min(jobs, len(limits)))]
    work: list[Work] = [
        (number, tuple(tests), sum(limits[test] for test in tests), None)
        for number, tests in enumerate(share)
    ]
    for _, outcome in run_all(work, pristine, jobs):
        if outcome.failed or outcome.broken or not outcome.passed:
            why = outcome.failed or outcome.broken or "they do not end, or are skipped"
            sys.exit(f"{outcome.log}\ntests fail on the source as it is: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only bugs with one of these in their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--catalogue", type=Path, default=Path(__file__).parent)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    every = read_catalogue(options.catalogue)
    chosen = [m for m in every if not options.words or any(w in m.name for w in options.words)]
    os.environ |= dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
    )  # jobs share cores
    for name in IMPORTS:
        importlib.import_module(name)
    began, rows = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        pristine = copy_tree(Path(folder) / "pristine")
        check_unmutated(chosen, pristine, options.jobs)
        print(f"tests pass on the source as it is, {time.monotonic() - began:.0f} s", flush=True)
        work = [(m.name, m.tests, m.seconds, m) for m in chosen]
        named = {m.name: m for m in chosen}
        for name, outcome in run_all(work, pristine, options.jobs):
            said = verdict(named[name], outcome)
            by = ", ".join(outcome.failed) or ("the time limit" if said == "caught" else "nobody")
            print(f"{said:9}{outcome.seconds:6.1f} s  {name}  ({by})", flush=True)
            rows[name] = {
                "name": name,
                "file": named[name].file,
                "verdict": said,
                "by": list(outcome.failed),
                "seconds": round(outcome.seconds, 1),
            }
    survivors = [name for name in named if rows[name]["verdict"] != "caught"]
    print(f"{len(named) - len(survivors)} of {len(named)} caught; survivors: {survivors or 'none'}")
    if len(chosen) == len(every):
        write_results(options.results, [rows[name] for name in named], time.monotonic() - began)
    sys.exit(len(survivors) > SPARED)


def write_results(path: Path, rows: list[dict[str, Any]], seconds: float) -> None:
    import torch  # noqa: PLC0415  (after the forks: flowdup is imported here alone)

    from flowdup.provenance import provenance  # noqa: PLC0415

    caught = sum(row["verdict"] == "caught" for row in rows)
    result = {
        "caught": caught,
        "survived": [row["name"] for row in rows if row["verdict"] != "caught"],
        "seconds": round(seconds),
        **provenance(torch.device("cpu")),
        "mutants": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
