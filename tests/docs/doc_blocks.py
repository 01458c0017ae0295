"""The code blocks of a Markdown page, and running them in order in a folder of their own.

- `python` blocks share one namespace per page; `bash` blocks are lines of `flowdup` and `python`.
- A block with a title (```python title="mynets.py") is written to that file, for later blocks.
- `<!-- not run: REASON -->` right before a block keeps it from being run.
- `<!-- given: NAME -->` asks for a folder of clients that a reader of the page has (`GIVEN`).
"""

import contextlib
import os
import re
import shlex
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked import FORK, run

from flowdup.config import load_config, load_table

FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>not run|given): (?P<note>.+?) -->\n)?"
    r"^(?P<indent> *)(?P<ticks>```+)(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)^(?P=indent)(?P=ticks)$",
    re.MULTILINE | re.DOTALL,
)
_SECONDS = 180  # for one command or block, on a busy machine
_FEW = ("data.train_clients=40", "data.validation_clients=20", "data.test_clients=10")
SMALLER = {  # so that pages take seconds: what a page says, and what is run
    r'"server\.rounds=300"': ", ".join(f'"{each}"' for each in ("server.rounds=2", *_FEW)),
    r"server\.rounds=300": "server.rounds=2",
    r"data\.train_clients=1_000_000": "data.train_clients=1_000_000 --set server.cohort=2",
    r"data\.certify_clients=400": "data.certify_clients=30 --set data.points=20",
    r"in range\(200\)": "in range(40)",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    title: str
    text: str
    reason: str = ""  # why it is not run
    given: str = ""  # what the reader has before it


def read_blocks(path: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    page = path.read_text()
    found = []
    for match in FENCE.finditer(page):
        cut = len(match["indent"])
        text = "".join(line[cut:] or "\n" for line in match["text"].splitlines(keepends=True))
        notes = {match["mark"]: match["note"] or ""}
        found.append(
            Block(
                path.name,
                page.count("\n", 0, match.start("ticks")) + 1,
                match["language"],
                match["title"] or "",
                text,
                notes.get("not run", ""),
                notes.get("given", ""),
            )
        )
    return found


def run_page(blocks: list[Block], folder: Path) -> int:
    """Run a page's blocks in the folder; an AssertionError says which one fails, and how."""
    ran = 0
    with _Python(folder) as python:
        for block in blocks:
            if block.given:
                GIVEN[block.given](folder / block.given)
            if block.reason or block.language == "text":
                continue
            if block.title:
                (folder / block.title).write_text(smaller(block.text))
            if block.language == "toml":
                if "compare" not in tomllib.loads(block.text):
                    load_config(str(folder / block.title))
            elif block.language == "bash":
                for words in commands(smaller(block.text)):
                    _run_command(words, folder, block)
            elif not block.title:
                python.run(smaller(block.text), block)
            ran += 1
    return ran


def smaller(text: str) -> str:
    """The same with less to do."""
    for large, small in SMALLER.items():
        text = re.sub(large, small, text)
    return text


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command of a bash block: one a line, unless a line ends in a backslash."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            assert words[0] in ("flowdup", "python"), f"a page cannot run '{line}' in a test"
            yield words


def _run_command(words: list[str], folder: Path, block: Block) -> None:
    done = run(_shortened(words, folder), folder, _SECONDS)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{_place(block)}: {shlex.join(words)}\n{said}"


def _shortened(words: list[str], folder: Path) -> list[str]:
    """Training and comparisons with few rounds and, of digits, few clients."""
    begun = [i for i, word in enumerate(words) if word in ("train", "compare")]
    if not begun or "--resume" in words:
        return words
    name, source = words[begun[0]], words[begun[0] + 1]
    with contextlib.chdir(folder):
        table = load_table(source)
    settings = ["server.rounds=2"]
    if table.get("before"):
        settings.append("before=[]")
    if table.get("data", {}).get("source") == "digits":
        settings += [few for few in _FEW if few.partition("=")[0] not in " ".join(words)]
    if name == "compare":
        long = any("rounds" in v.get("server", {}) for v in table["compare"]["variants"].values())
        words = [*words, "--jobs=1", *(["--only=fedavg"] if long else [])]
    return [*words, *(f"--set={setting}" for setting in settings)]


class _Python:
    """A forked process with the namespace of a page's Python blocks; begun with the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: Any = None
        self.connection, self.other = FORK.Pipe()

    def __enter__(self) -> "_Python":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process:
            self.process.kill()
            self.process.join()

    def run(self, text: str, block: Block) -> None:
        if self.process is None:
            self.process = FORK.Process(target=_session, args=(self.other, self.folder))
            self.process.start()
        self.connection.send((_place(block), text))
        assert self.connection.poll(_SECONDS), f"{_place(block)} takes longer than {_SECONDS} s"
        said = self.connection.recv()
        assert not said, f"{_place(block)}:\n{said}"


def _session(connection: Connection, folder: Path) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    names: dict[str, Any] = {"__name__": "page"}
    while True:
        place, text = connection.recv()
        said = ""
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                exec(compile(text, place, "exec"), names)
        except Exception:
            said = traceback.format_exc()
        connection.send(said)


def _place(block: Block) -> str:
    return f"{block.page}, line {block.line}"


def _clients(folder: Path) -> None:
    """Twelve clients in two places, nine of them with labels."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(12):
        y = draw.integers(0, 3, size=20)
        x = (y[:, None] + draw.normal(size=(20, 4)) + number % 2).astype(np.float32)
        np.savez(folder / f"client-{number:02}.npz", x=x, y=y if number % 4 else np.full(20, -1))


GIVEN: dict[str, Callable[[Path], None]] = {"clients": _clients}
