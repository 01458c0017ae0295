"""`make wheel-check`: build the wheel, install it where nothing else is, and run `flowdup demo`.

It fails if the package, the preset of the demo or the commit that results name is not the wheel's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


def call(*words: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints on stdout; its errors go to the terminal."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FLOWDUP"))}
    print(f"{time.strftime('%H:%M:%S')}  {' '.join(map(str, words))}", flush=True)
    done = subprocess.run([*map(str, words)], cwd=cwd, env=own, text=True, check=True, stdout=-1)
    return done.stdout


def expect(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        sys.exit(f"{what} is {found!r} and should be {wanted!r}")


def check(folder: Path, settings: list[str]) -> None:
    commit = call("git", "describe", "--always", "--dirty").strip()
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet")
    call(*pip, "--no-deps", "--wheel-dir", folder / "dist", ROOT)
    (wheel,) = (folder / "dist").glob("flowdup-*.whl")
    version = wheel.name.split("-")[1]
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    install = (programs / "pip", "install", "--quiet", "--constraint", CONSTRAINTS)
    call(*install, "torch")  # first: it decides which build the others get
    call(*install, wheel)
    away = folder / "elsewhere"
    away.mkdir()
    place = call(programs / "python", "-c", "import flowdup; print(flowdup.__file__)", cwd=away)
    expect(Path(place.strip()).is_relative_to(folder / "venv"), True, f"installed at {place}")
    told = call(programs / "flowdup", "--version", cwd=away)
    expect(told, f"flowdup {version} (commit {commit})\n", "flowdup --version")
    text = "from flowdup.export.page import FOLDER; print((FOLDER / 'index.html').is_file())"
    has_page = call(programs / "python", "-c", text, cwd=away)
    expect(
        has_page, f"{(ROOT / 'src/flowdup/page/index.html').is_file()}\n", "whether it has a page"
    )
    start = time.monotonic()
    chosen = [f"--set={setting}" for setting in settings]
    print(call(programs / "flowdup", "demo", *chosen, cwd=away))
    print(f"the demo took {time.monotonic() - start:.0f} s")
    runs = sorted((away / "runs" / "demo").glob("*/seed-*"))
    expect(len(runs), 15, "the number of runs")
    for run in runs:
        result = json.loads((run / "evaluation.json").read_text())
        expect((result["versions"]["flowdup"], result["commit"]), (version, commit), str(run))
    expect((away / "runs/demo/flowdup/seed-0/embedding.png").is_file(), True, "the figure")
    expect((away / "runs/demo/comparison.html").is_file(), True, "the page")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], help="of the demo, to shorten it")
    with tempfile.TemporaryDirectory(prefix="flowdup-wheel-") as folder:
        check(Path(folder), parser.parse_args().set)
    print("the wheel works")


if __name__ == "__main__":
    main()
