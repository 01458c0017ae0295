"""Two writers never share a run folder, and what killed ones leave is swept."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from small import METHODS, population

from flowdup import evaluate_run, load, read_config, train_run
from flowdup.config import Config
from flowdup.errors import FlowdupError, FolderInUseError
from flowdup.files import remove_stale_temporaries, write_atomic
from flowdup.run import RunFolder, write_report
from flowdup.run.lock import locked

HOLD = (
    "import sys, time; from pathlib import Path\n"
    "from flowdup.run import RunFolder; from flowdup.run.lock import locked\n"
    "with locked(RunFolder(Path(sys.argv[1]))):\n"
    "    print('held', flush=True); time.sleep(60)\n"
)
WRITE = (
    "import os, signal, sys; from pathlib import Path; from flowdup.files import write_atomic\n"
    "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
    "write_atomic(Path(sys.argv[1]), b'new')\n"
)


def config(rounds: int = 4) -> Config:
    return read_config(
        {
            "model": "mlp",
            "method": METHODS["fedavg"],
            "server": {"rounds": rounds, "cohort": 2},
            "run": {"checkpoint_every": 1},
        }
    )


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_writer_is_refused_with_the_pid_until_the_first_is_dead(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(FolderInUseError, match=f"by process {holder.pid} on "):
        next(train_run(config(), tmp_path, population=population()))
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert len(list(train_run(config(), tmp_path, population=population()))) == 4


def test_a_run_is_locked_from_its_first_round_to_its_last(tmp_path: Path) -> None:
    first = train_run(config(), tmp_path, population=population())
    next(first)
    for resume in (False, True):
        with pytest.raises(FolderInUseError, match=f"by process {os.getpid()} on "):
            next(train_run(config(), tmp_path, resume, population()))
    assert [metrics["round"] for metrics in first] == [2, 3, 4]
    again = train_run(config(5), tmp_path, True, population())
    assert [metrics["round"] for metrics in again] == [5]


def test_of_two_that_start_at_once_one_trains(tmp_path: Path) -> None:
    refused, trained = list[Exception](), list[int]()

    def train() -> None:
        try:
            trained.append(
                len(list(train_run(config(), tmp_path / "run", population=population())))
            )
        except FlowdupError as error:
            refused.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trained == [4] and len(refused) == 3
    assert [m["round"] for m in RunFolder(tmp_path / "run").read_metrics()] == [1, 2, 3, 4]


def test_a_running_run_is_evaluated_loaded_and_reported(tmp_path: Path) -> None:
    rounds = train_run(config(), tmp_path, population=population())
    next(rounds)
    assert evaluate_run(tmp_path, population())["round"] == 1
    assert load(tmp_path).round == 1
    assert write_report(tmp_path).stat().st_size > 1000
    assert [metrics["round"] for metrics in rounds] == [2, 3, 4]


def test_without_locks_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network filesystems."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\)"):
        assert len(list(train_run(config(), tmp_path, population=population()))) == 4


def test_what_a_killed_writer_left_is_swept_and_what_a_living_one_writes_stays(
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "checkpoint"
    for path in (tmp_path / "report.html", checkpoint / "checkpoint.json"):
        killed = subprocess.run([sys.executable, "-c", WRITE, str(path)], check=False)
        assert killed.returncode == -signal.SIGKILL
    left = [*tmp_path.glob(".*.tmp"), *checkpoint.glob(".*.tmp")]
    assert len(left) == 2
    mine = tmp_path / ".evaluation.json.0123.tmp"
    with open(mine, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with locked(RunFolder(tmp_path)):
            assert not any(path.exists() for path in left)
            assert mine.exists()


def test_who_writes_a_file_sweeps_what_a_killed_writer_of_it_left(tmp_path: Path) -> None:
    """In any folder, where other names are none of its business, and glob's signs no signs."""
    path = tmp_path / "results[1].json"
    killed = subprocess.run([sys.executable, "-c", WRITE, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    others = [".results1.json.0123456789abcdef.tmp", ".results[1].json.mine.tmp", "results.tmp"]
    for name in others:
        (tmp_path / name).touch()
    mine = tmp_path / f".{path.name}.0123456789abcdef.tmp"
    with open(mine, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_atomic(path, b"new")
        assert {p.name for p in tmp_path.iterdir()} == {path.name, mine.name, *others}


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Nor does one who sweeps."""
    path, end, errors = tmp_path / "file", time.monotonic() + 0.5, list[Exception]()
    contents = [bytes([65 + i]) * 100_000 for i in range(4)]

    def write(content: bytes) -> None:
        try:
            while time.monotonic() < end:
                write_atomic(path, content)
                assert path.read_bytes() in contents
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        remove_stale_temporaries(tmp_path)
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert not errors
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_has_the_permissions_that_a_new_file_has(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"")
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_read_only_folder_is_refused_before_anything_is_trained() -> None:
    """By a user who may not write: permissions do not bind root."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from flowdup.errors import FlowdupError\n"
        "from flowdup.run import RunFolder; from flowdup.run.lock import locked\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for name in ('run', 'run/checkpoint'):\n"
        "    try:\n"
        "        with locked(RunFolder(Path(sys.argv[1], name))): print('held')\n"
        "    except FlowdupError as error: print(error)\n"
    )
    with TemporaryDirectory() as home:  # which the user can look into, unlike pytest's
        out = Path(home) / "run"
        list(train_run(config(), out, population=population()))
        (out / "lock").chmod(0o666)
        for path, mode in ((Path(home), 0o755), (out, 0o777), (out / "checkpoint", 0o555)):
            path.chmod(mode)
        command = [sys.executable, "-c", code, home]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        first, second = done.stdout.splitlines()
        assert first.startswith(f"could not write {out / 'checkpoint'}: it is read-only")
        assert second.startswith(f"could not write {out / 'checkpoint' / 'lock'}: Permission")
