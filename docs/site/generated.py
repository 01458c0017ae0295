"""Pages that come from the program itself: its settings, commands and methods, as Markdown."""

import inspect
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import typer

from flowdup.cli import app
from flowdup.config import preset_names, preset_text
from flowdup.methods import METHODS, summary
from flowdup.setting_list import Setting, list_settings

_OPTIONS_OF_TYPER = {"help", "install_completion", "show_completion"}


def settings() -> str:
    """A table of every part of the settings: key, default, meaning."""
    parts = []
    for part, found in groupby(sorted(list_settings(), key=_part), key=_part):
        rows = [f"| `{s.key}` | `{s.default}` | {_meaning(s)} |" for s in found]
        parts.append(
            f"## {part or 'At the top'}\n\n| setting | default | meaning |\n| --- | --- | --- |\n"
            + "\n".join(rows)
        )
    return "\n\n".join(parts)


def commands() -> str:
    """Every command with its arguments and options, as `--help` tells them."""
    root = typer.main.get_command(app)
    return "\n\n".join(_command(name, command) for name, command in _commands(root, "flowdup"))


def methods() -> str:
    """Every method with the text at the head of its file, and where its settings stand."""
    parts = []
    for name, entry in METHODS.items():
        module = inspect.getmodule(entry.method)
        text = inspect.getdoc(module) or inspect.getdoc(entry.method) or ""
        head = summary(name)
        rest = text.partition("\n")[2].strip("\n")
        own = f" Settings: {', '.join(_own_settings(name))}." if _own_settings(name) else ""
        body = f"{rest}\n\nDefined in `{entry.method.__module__}`.{own}"
        parts.append(f"### {name}\n\n{head[:1].upper()}{head[1:]}.\n\n{body}")
    return "\n\n".join(parts)


def presets() -> str:
    """Every preset as it is."""
    return "\n\n".join(
        f"### {name}\n\n```toml\n{preset_text(name).rstrip()}\n```" for name in preset_names()
    )


GENERATED: dict[str, Callable[[], str]] = {
    "settings": settings,
    "commands": commands,
    "methods": methods,
    "presets": presets,
}


def _part(setting: Setting) -> str:
    return setting.key.partition(".")[0] if "." in setting.key else ""


def _cell(text: str) -> str:
    """A vertical bar would end the cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _meaning(setting: Setting) -> str:
    of = f" *({', '.join(setting.methods)})*" if setting.methods else ""
    return f"{_cell(setting.meaning)}{of}"


def _own_settings(name: str) -> list[str]:
    return [f"`{s.key}`" for s in list_settings("method") if name in s.methods]


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """A command and those below it; of click's or of typer's own classes, as typer's version is."""
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from _commands(below, f"{name} {word}")


def _command(name: str, command: Any) -> str:
    shown = [p for p in command.params if p.name not in _OPTIONS_OF_TYPER]
    words = [_words(p) if p.required else f"[{_words(p)}]" for p in shown if _is_argument(p)]
    table = ["| | |", "| --- | --- |", *map(_row, shown)] if shown else []
    text = inspect.cleandoc(command.help or "")
    return "\n".join([f"## {name}", "", f"`{' '.join([name, *words])}`", "", text, "", *table])


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _words(parameter: Any) -> str:
    if _is_argument(parameter):
        return str(parameter.metavar or parameter.name.upper())
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def _row(parameter: Any) -> str:
    need = " Must be given." if parameter.required else ""
    default = parameter.default
    shown = default not in (None, False, "", ()) and not callable(default)
    given = f" Default: `{default}`." if shown else ""
    return f"| `{_words(parameter)}` | {_cell(parameter.help or '')}{need}{given} |"
