"""What the wheel holds: every file of the package, presets, experiments, its commit, and the page
if that was built.
"""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from flowdup.provenance import commit
from flowdup.version import __version__

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "src/flowdup/page"  # there if `make web-page` was run


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """Built by hatchling alone, which needs no network."""
    pytest.importorskip("hatchling", reason="the extra 'dev' has it")
    if not (ROOT / ".git").exists():
        pytest.skip("the files of the package are known from its history")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ZipFile(next(out.glob(f"flowdup-{__version__}-py3-none-any.whl")))


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: ZipFile) -> None:
    tracked = git("ls-files", "--cached", "--others", "--exclude-standard", "src/flowdup")
    package = {path.removeprefix("src/") for path in tracked.splitlines() if (ROOT / path).exists()}
    tables = {f"flowdup/experiments/{path.name}" for path in (ROOT / "experiments").glob("*.toml")}
    page = {path.relative_to(ROOT / "src").as_posix() for path in PAGE.rglob("*") if path.is_file()}
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == package | tables | page | {"flowdup/commit.txt"}
    assert {"flowdup/presets/demo.toml", "flowdup/py.typed", "flowdup/cli.py"} <= found


def test_the_wheel_knows_its_commit_version_and_command(wheel: ZipFile, tmp_path: Path) -> None:
    described = git("describe", "--always", "--dirty").strip()
    assert wheel.read("flowdup/commit.txt").decode().strip() == described
    wheel.extractall(tmp_path)
    assert commit(tmp_path / "flowdup") == described
    about = wheel.read(f"flowdup-{__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in about and "\nRequires-Dist: torch>=2.9" in about
    points = wheel.read(f"flowdup-{__version__}.dist-info/entry_points.txt").decode()
    assert "flowdup = flowdup.cli:main" in points


def test_the_unpacked_wheel_runs_without_the_repository(wheel: ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    text = "import flowdup.cli as cli; cli.main()"
    command = [sys.executable, "-c", text, "presets"]
    own = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=tmp_path, env=own, capture_output=True, text=True, check=True
    )
    assert (done.returncode, done.stderr) == (0, "") and "demo" in done.stdout
