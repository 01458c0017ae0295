"""Names of a user's own, from a file and from an installed package."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from flowdup.errors import ConfigError
from flowdup.methods import METHODS, register_method, summary
from flowdup.methods.fedavg import FedAvg
from flowdup.registry import Registry

PLUGIN = """
import flowdup
from torch import nn

flowdup.register_model("from-a-plugin", lambda shape, outputs: nn.Linear(shape[0], outputs))
"""


def run(code: str, folder: Path) -> str:
    """What a process prints in whose path a package lies, and whose current folder is another."""
    path = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    command = [sys.executable, "-P", "-c", path + code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def install(folder: Path, plugin: str) -> None:
    """As a wheel would: a module, and what it offers in its metadata."""
    (folder / "a_plugin.py").write_text(plugin)
    about = folder / "a_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[flowdup]\nmine = a_plugin\n")


def test_an_installed_package_registers_by_its_entry_point(tmp_path: Path) -> None:
    install(tmp_path, PLUGIN)
    code = "from flowdup.models import MODELS; print('from-a-plugin' in MODELS, *MODELS)"
    assert run(code, tmp_path).startswith("True cnn ")
    build = "from flowdup.models import build_network as b; print(b('from-a-plugin', (3,), 2, abs))"
    assert "Linear" in run(build, tmp_path)


def test_a_package_is_imported_only_when_its_names_are_needed(tmp_path: Path) -> None:
    install(tmp_path, "print('imported')")
    assert run("import flowdup", tmp_path) == ""
    assert run("from flowdup.models import MODELS; MODELS['cnn']", tmp_path) == ""
    assert run("from flowdup.methods import METHODS; list(METHODS)", tmp_path) == "imported\n"


def test_a_broken_package_is_named(tmp_path: Path) -> None:
    install(tmp_path, "1 / 0")
    told = run("from flowdup.methods import METHODS; list(METHODS)", tmp_path)
    assert "the installed plugin 'mine' failed with ZeroDivisionError" in told


def test_the_current_folder_is_on_the_path_only_for_modules_that_are_imported(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text("print('imported')")
    show = "import sys; print('' in sys.path)"
    assert run(f"from flowdup.registry import import_modules as i; i([]); {show}", tmp_path) == (
        "False\n"
    )
    code = "from flowdup.registry import import_modules as i; i(['mine.py', 'mine.py'])"
    assert run(f"{code}; {show}", tmp_path) == "imported\nFalse\n"


def test_a_name_is_given_once_and_an_unknown_one_is_answered_with_the_nearest() -> None:
    registry = Registry("thing", {"alpha": 1})
    registry.register("alpha", 1)
    with pytest.raises(ConfigError, match="a thing named 'alpha' exists already"):
        registry.register("alpha", 2)
    with pytest.raises(ConfigError, match=r"unknown thing 'alhpa' \(did you mean 'alpha'\?\)"):
        registry.find("alhpa")
    registry.unregister("alpha")
    registry.register("alpha", 2)
    assert registry.find("alpha") == 2


def test_a_file_that_is_not_there_or_has_the_name_of_another_module_is_refused(
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for folder in (tmp_path, other):
        (folder / "mine.py").write_text("")
    (other / "statistics.py").write_text("")
    load = "from flowdup.registry import import_modules as i; i({})".format
    assert "no file" in run(load("['none.py']"), tmp_path)
    assert "has the name of another module" in run(load("['mine.py', 'other/mine.py']"), tmp_path)
    assert "rename the file" in run(load("['other/statistics.py']"), tmp_path)


def test_a_class_that_is_no_method_and_settings_without_defaults_are_refused() -> None:
    @dataclass(frozen=True)
    class Bare:
        scale: float

    with pytest.raises(ConfigError, match="must be a subclass of Method"):
        register_method("odd", int)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="need defaults"):
        register_method("odd", FedAvg, Bare)


def test_two_methods_in_one_file_are_told_apart_by_their_classes() -> None:
    class One(FedAvg):
        """The first."""

    class Two(FedAvg):
        """The second."""

    for name, method in (("one", One), ("two", Two)):
        register_method(name, method)
    try:
        assert [summary(name) for name in ("one", "two")] == ["The first", "The second"]
    finally:
        for name in ("one", "two"):
            METHODS.unregister(name)
