"""A whole run as a user starts it, from the command to the end of its process."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from contest import Result

from flowdup.config import load_config
from flowdup.data.sources import data_folder, named
from flowdup.provenance import provenance


def whole_run(title: str, preset: str, settings: Sequence[str], device: str) -> list[Result]:
    """Twice: with nothing compiled before, then with what the first left in caches: torch's,
    Triton's, and Python's own of its modules.
    """
    head = {"work": title, "contender": "flowdup, cold", "ms_per_round": None, "ratio_to_pfl": None}
    here = provenance(torch.device(device))
    source = load_config(preset).data.source
    if not named(source).find(data_folder()):
        return [head | {"seconds": None, "absent": f"{source} is not in {data_folder()}"} | here]
    rows = []
    with TemporaryDirectory() as folder:
        for state in ("cold", "warm"):
            found = _run(preset, [*settings, f"engine.device={device}"], Path(folder), state)
            rows.append(head | {"contender": f"flowdup, {state}"} | found)
            if "failed" in found:
                break
    return [row | here for row in rows]


def _run(preset: str, settings: Sequence[str], folder: Path, state: str) -> Result:
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPYCACHEPREFIX": str(folder / "python"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    options = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "flowdup", "train", preset, "--out", str(folder / state)]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--json", *options],
        env=os.environ | caches,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return {"seconds": None, "failed": "".join(done.stderr.splitlines()[-1:])}
    last = json.loads(done.stdout.splitlines()[-1])
    return {
        "seconds": round(seconds, 2),
        "rounds": last["round"],
        "seconds_of_rounds": last["seconds"],  # after imports, data and the engine's making
        "validation_accuracy": last.get("validation_accuracy"),
    }
