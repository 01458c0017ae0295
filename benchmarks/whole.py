"""A whole run as a user starts it, from the command to the end of its process."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from checkout import HERE, command, commit, environment
from contest import BEFORE, Result

from flowdup.config import load_config
from flowdup.data.sources import data_folder, named
from flowdup.provenance import provenance


def whole_run(
    title: str, preset: str, settings: Sequence[str], device: str, against: Path | None = None
) -> list[Result]:
    """Twice: with nothing compiled before, then with what the first left in caches: torch's,
    Triton's, and Python's own of its modules; if asked, by another checkout after each.
    """
    head = {"work": title, "contender": "flowdup, cold", "ms_per_round": None, "ratio_to_pfl": None}
    here = provenance(torch.device(device))
    source = load_config(preset).data.source
    if not named(source).find(data_folder()):
        return [head | {"seconds": None, "absent": f"{source} is not in {data_folder()}"} | here]
    settings = [*settings, f"engine.device={device}"]
    homes = {"": HERE} | ({BEFORE: against} if against else {})
    rows: dict[tuple[str, str], Result] = {}
    with TemporaryDirectory() as folder:
        for state, (end, home) in product(("cold", "warm"), homes.items()):
            if "failed" not in rows.get(("cold", end), {}):
                found = _run(preset, settings, Path(folder) / end.strip(", "), state, home)
                about = here if home == HERE else here | {"commit": commit(home)}
                contender = {"contender": f"flowdup, {state}{end}"}
                rows[state, end] = head | contender | found | about
    for (state, end), row in rows.items():
        before = rows.get((state, BEFORE), {}).get("seconds")
        if not end and before and row["seconds"]:
            row["ratio_to_before"] = round(before / row["seconds"], 3)
    return list(rows.values())


def _run(preset: str, settings: Sequence[str], folder: Path, state: str, home: Path) -> Result:
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPYCACHEPREFIX": str(folder / "python"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    options = [word for setting in settings for word in ("--set", setting)]
    words = ["train", preset, "--out", str(folder / state), "--json", *options]
    start = time.perf_counter()
    done = subprocess.run(
        command(home, "flowdup", *words),
        env=environment(home) | caches,
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
