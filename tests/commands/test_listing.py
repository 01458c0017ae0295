"""What can be set, what is set already, which version this is, and what a shell completes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands.here import flowdup

import flowdup as package
from flowdup.config import preset_names
from flowdup.provenance import UNKNOWN, commit


def test_settings_are_printed_as_toml_with_their_meanings() -> None:
    lines = flowdup("settings", "server").out.splitlines()
    (rounds,) = (line for line in lines if line.startswith("server.rounds = 500 "))
    assert rounds.endswith("# how many a stage has")
    found = json.loads(flowdup("settings", "method.mu", "--json").out)
    assert [(row["key"], row["default"], row["methods"]) for row in found] == [
        ("method.mu", "1.0", ["fedprox"])
    ]
    ended = flowdup("settings", "optimizer")
    assert ended.code == 2 and "'client.optimizer' or 'server.optimizer'" in ended.error


def test_presets_are_listed_with_what_they_are() -> None:
    lines = flowdup("presets").out.splitlines()
    assert [line.split()[0] for line in lines] == preset_names()
    told = {row["name"]: row["summary"] for row in json.loads(flowdup("presets", "--json").out)}
    assert told["digits-plus"] == "FLowDUP+ on the clients of the preset digits."
    assert all(told.values())


def test_the_version_is_told_with_the_commit() -> None:
    ended = flowdup("--version")
    known = "" if commit() == UNKNOWN else f" (commit {commit()})"
    assert ended == (0, f"flowdup {package.__version__}{known}\n", "")


def test_an_installed_package_knows_the_commit_that_it_was_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOWDUP_COMMIT", raising=False)
    package = tmp_path / "site-packages" / "flowdup"
    package.mkdir(parents=True)
    assert commit(package) == UNKNOWN
    (package / "commit.txt").write_text("c0ffee\n")
    assert commit(package) == "c0ffee"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("flowdup sett", ["settings"]),
        ("flowdup train digi", ["digits", "digits-plus"]),
        ("flowdup train digits --set server.r", ["server.rounds=", "server.replacement="]),
        ("flowdup settings run.k", ["run.keep"]),
    ],
)
def test_a_shell_completes_commands_presets_and_settings(
    words: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bash asks, by the environment."""
    monkeypatch.setenv("_FLOWDUP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert flowdup().out.split() == found


def test_bash_completes_with_the_script_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that --install-completion installs, in a real bash."""
    with monkeypatch.context() as context:
        context.setenv("_FLOWDUP_COMPLETE", "source_bash")
        script = flowdup().out
    words = "COMP_WORDS=(flowdup pres); COMP_CWORD=1"
    ask = f'{script}\n{words}; _flowdup_completion flowdup; echo "${{COMPREPLY[@]}}"'
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", ask],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path},
        check=True,
    )
    assert done.stdout == "presets\n"
