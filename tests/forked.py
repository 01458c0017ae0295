"""`flowdup` in processes of its own, forked from one that has done all imports.

They are as real as others and begin without the seconds that imports take each time.
"""

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver, get_context
from pathlib import Path
from unittest.mock import patch

import torch

FORK = get_context("forkserver")
_SLOW_IMPORTS = """
    flowdup.cli torch._dynamo torch.export torch.utils.flop_counter torch.utils.tensorboard
    sklearn.datasets sklearn.decomposition sklearn.manifold sklearn.metrics
    matplotlib.figure matplotlib.backends.backend_agg pyarrow.parquet
"""
_READ_AT_IMPORT = {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}  # by rich and by torch
FORK.set_forkserver_preload(_SLOW_IMPORTS.split())


def flowdup(
    *words: object, cwd: Path | None = None, seconds: float = 180
) -> subprocess.CompletedProcess[str]:
    """A command line, with what it said."""
    return run(["flowdup", *map(str, words)], cwd or Path.cwd(), seconds)


def run(words: list[str], cwd: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """`flowdup ...` or `python FILE`; -9 if it takes longer than so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "error")]
        process = FORK.Process(target=_command, args=(words, cwd, dict(os.environ), said))
        with patch.dict(os.environ, _READ_AT_IMPORT):
            forkserver.ensure_running()
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        out, error = (path.read_text() if path.exists() else "" for path in said)
    code = process.exitcode
    assert code is not None
    return subprocess.CompletedProcess(words, code, out, error)


def _command(words: list[str], cwd: Path, environment: Mapping[str, str], said: list[Path]) -> None:
    """In the forked process."""
    for number, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update({**environment, **_READ_AT_IMPORT})
    torch.set_num_threads(1)
    os.chdir(cwd)
    if words[0] == "python":
        sys.path.insert(0, str(Path(words[1]).parent.absolute()))
        runpy.run_path(words[1], run_name="__main__")
        return
    from flowdup.cli import main  # noqa: PLC0415  (preloaded in the process that forks)

    sys.argv = words
    main()
