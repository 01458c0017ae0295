"""What is written survives a power cut: contents are synced before names, names before an answer.

Real system calls are observed as they are made; nothing is replaced by another thing.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from small import STREAM, client
from test_checkpoint import FLOWDUP, SPECIFICATION, state

from flowdup.checkpoint import load_checkpoint, save_checkpoint
from flowdup.errors import FlowdupError
from flowdup.files import write_atomic
from flowdup.personalize import PersonalModel, load_model


class Call(NamedTuple):
    kind: str  # sync or rename
    inode: int  # of the file or folder that is synced, or that gets a new name
    folder: int  # rename: where


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every sync and every renaming of this process, in order."""
    seen: list[Call] = []

    def observed(real: Callable[..., Any], describe: Callable[..., Call]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            seen.append(describe(*arguments))
            return real(*arguments, **named)

        return call

    def sync(descriptor: Any) -> Call:
        return Call("sync", os.stat(descriptor).st_ino, 0)

    def rename(source: Any, target: Any) -> Call:
        return Call("rename", os.stat(source).st_ino, os.stat(Path(target).parent).st_ino)

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, observed(getattr(os, name), sync))
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, observed(getattr(os, name), rename))
    return seen


def save_model(folder: Path) -> None:
    model = PersonalModel(SPECIFICATION.model, SPECIFICATION.inputs, FLOWDUP.f.init(STREAM))
    model.save(folder / "me.safetensors")
    assert load_model(folder / "me.safetensors").predict(client(0, 3).x).shape == (3,)


def save_run(folder: Path) -> None:
    save_checkpoint(folder, SPECIFICATION, state())
    save_checkpoint(folder, SPECIFICATION, state(4))
    assert load_checkpoint(folder)[1].round == 4


WRITERS = {"a checkpoint": save_run, "a model": save_model}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_contents_are_synced_before_a_file_gets_its_name(
    write: Callable[[Path], None], calls: list[Call], tmp_path: Path
) -> None:
    write(tmp_path)
    renamed = {call.inode: at for at, call in enumerate(calls) if call.kind == "rename"}
    files = [f for f in tmp_path.iterdir() if f.suffix in (".json", ".safetensors")]
    assert files
    for file in files:
        at = renamed[file.stat().st_ino]
        assert Call("sync", file.stat().st_ino, 0) in calls[:at], file


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_folder_is_synced_after_each_name_in_it(
    write: Callable[[Path], None], calls: list[Call], tmp_path: Path
) -> None:
    """A tensor file's name before the header's that names it, and both before the answer."""
    write(tmp_path)
    renames = [at for at, call in enumerate(calls) if call.kind == "rename"]
    assert renames
    for at, following in zip(renames, [*renames[1:], len(calls)], strict=True):
        assert Call("sync", calls[at].folder, 0) in calls[at:following]


def test_a_link_is_written_through_and_a_device_is_refused(tmp_path: Path) -> None:
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomic(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    os.mkfifo(pipe)
    with pytest.raises(FlowdupError, match="is a device or the like"):
        write_atomic(pipe, b"new")
    assert pipe.is_fifo()
    with pytest.raises(FlowdupError, match="is a folder"):
        write_atomic(tmp_path, b"new")
