"""Several at once: two writers of one run, a full disk, threads that read while a run writes."""

import hashlib
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from small import client

import flowdup
from flowdup.run import write_report
from torture.runs import Result, Work, fork, share, shorter, train, wait_for

_DISK = 2_000_000  # bytes


def writers(works: list[Work], home: Path, pairs: int, processes: int) -> Result:
    """Pairs that start at the same moment: one trains, the other is refused with its pid."""

    def pair(number: int) -> list[str]:
        work, folder = works[number % len(works)], home / f"pair-{number}"
        ready, go = os.pipe()

        def race() -> None:
            os.close(go)
            os.read(ready, 1)  # until the other end is closed
            train(work.config, folder)

        racers = [fork(race) for _ in range(2)]
        os.close(go)
        outcomes = {pid: wait_for(pid, hear) for pid, hear in racers}
        os.close(ready)
        (a, first), (b, second) = outcomes.items()
        for own, (code, told), (other, _) in ((a, first, (b, 0)), (b, second, (a, 0))):
            refused = code == 2 and f"is being trained into by process {other} on" in told
            if refused:
                (home / f"refused-{number}").touch()
            elif code != 0:
                return [f"{folder.name}: {own} ended with {code} {told}"]
        if first[0] and second[0]:
            return [f"{folder.name}: both were refused"]
        return work.deviations(folder)

    deviations = share([partial(pair, number) for number in range(pairs)], processes)
    refused = len(list(home.glob("refused-*")))  # the others began when the first had ended
    return {"pairs": pairs, "refused": refused, "deviations": deviations}


def full_disk(works: list[Work], home: Path, times: int) -> Result:
    """Files that may not grow, and a small filesystem with hardly any room left."""
    found, stopped = list[str](), {"by_file_size": 0, "by_filesystem": 0}
    size = max(f.stat().st_size for f in _first_checkpoint(works[0], home))
    for number in range(times):
        folder = home / f"limited-{number}"
        limit = size * (number + 1) // times
        stopped["by_file_size"] += _starved(works[0], folder, limit, found)
    told = ""
    try:
        with _small_filesystem(home / "disk") as disk:
            for number in range(times):
                ballast = disk / "ballast"
                ballast.write_bytes(bytes(_room(disk) - 4 * size * (number + 1) // times))
                folder = disk / f"full-{number}"
                stopped["by_filesystem"] += _starved(works[0], folder, None, found, ballast)
    except subprocess.CalledProcessError:
        told = "mounting a small filesystem is not permitted here: files of limited size only"
    return stopped | ({"note": told} if told else {}) | {"deviations": found}


def _first_checkpoint(work: Work, home: Path) -> list[Path]:
    folder = home / "first"
    wait_for(*fork(lambda: train(shorter(work, 1), folder)))
    return list((folder / "checkpoint").iterdir())


def _starved(
    work: Work, folder: Path, limit: int | None, found: list[str], ballast: Path | None = None
) -> bool:
    """Whether training stopped for want of room; then there is room and it goes on."""

    def starving() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        train(work.config, folder)

    code, told = wait_for(*fork(starving))
    if code not in (0, 2) or (code == 2 and "could not write" not in told):
        found.append(f"{folder.name}: {code} {told}")
    if ballast is not None:
        ballast.unlink()
    found += work.resumed(folder)
    return code == 2


@contextmanager
def _small_filesystem(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _room(disk: Path) -> int:
    state = os.statvfs(disk)
    return state.f_bavail * state.f_frsize


def threads(works: list[Work], home: Path, readers: int, times: int) -> Result:
    """Threads that load, personalize and report while a run writes; a round has one model."""
    work, found, seen = works[1], list[str](), list[tuple[int, str]]()
    for number in range(times):
        run, ended = home / f"read-{number}", threading.Event()
        pid, hear = fork(partial(train, work.config, run))
        while not (run / "checkpoint" / "checkpoint.json").exists():
            os.sched_yield()
        arguments = (run, ended, seen, found)
        pool = [threading.Thread(target=_read, args=arguments) for _ in range(readers)]
        for thread in pool:
            thread.start()
        code, told = wait_for(pid, hear)
        ended.set()
        for thread in pool:
            thread.join()
        found += [f"the run ended with {code} {told}"] if code else work.deviations(run)
    models = {round: len({d for r, d in seen if r == round}) for round, _ in seen}
    found += [f"round {round} gave {count} models" for round, count in models.items() if count > 1]
    return {"runs": times, "threads": readers, "loaded": len(seen), "deviations": found}


def _read(run: Path, ended: threading.Event, seen: list[tuple[int, str]], found: list[str]) -> None:
    """Until the run has ended, and once more."""
    torch.set_num_threads(1)  # a new thread's first product would use all cores, with other bits
    x, last, more = client(30, 7).x, 0, True
    try:
        while more:
            more = not ended.is_set()
            federation = flowdup.load(run)
            seen.append((federation.round, _digest(federation.personalize(x))))
            write_report(run)
            if federation.round < last:
                found.append(f"{run.name}: round {federation.round} after {last}")
            last = federation.round
    except Exception as error:
        found.append(f"{run.name}: {error!r}")


def _digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()
