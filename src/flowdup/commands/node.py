"""The command `flowdup node`: take part in a federation with one's own data, which stay here."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flowdup.commands.options import Json
from flowdup.errors import ConfigError
from flowdup.registry import import_modules


def node(
    context: typer.Context,
    kit: Annotated[Path, typer.Argument(help="The folder that the coordinator handed over.")],
    action: Annotated[str, typer.Argument(help="'personalize', or nothing: take part.")] = "",
    data: Annotated[Path | None, typer.Option(help="Clients: .npz files, images, a table.")] = None,
    withhold: Annotated[
        list[str] | None,
        typer.Option(help="What is not told: 'clients' (how many) or 'labels' (who has some)."),
    ] = None,
    secure_sum: Annotated[
        bool | None, typer.Option(help="Send updates in secure sums alone, or not at all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Take part in a federation, or make this node's models from the psi that it has.

    With --data all settings are stored anew; without it the others are added to the stored ones.
    """
    check_engine()
    from flowdup.federation.kit import open_kit  # noqa: PLC0415
    from flowdup.federation.models import personalize_node  # noqa: PLC0415
    from flowdup.federation.processes import (  # noqa: PLC0415
        WITHHELD,
        NodeSettings,
        become_node,
        read_node_settings,
        write_node_settings,
    )

    if action not in ("", "personalize"):
        raise ConfigError(f"a node cannot '{action}': use 'personalize', or nothing to take part")
    opened = open_kit(kit)
    if data is None and not opened.settings.is_file():
        raise ConfigError("say where this node's clients are: --data FOLDER")
    if data is not None and not data.exists():
        raise ConfigError(f"there is no {data}: give the folder or table of this node's clients")
    if odd := set(withhold or []) - {*WITHHELD}:
        raise ConfigError(f"'{min(odd)}' cannot be withheld: use {' or '.join(WITHHELD)}")
    stored = read_node_settings(opened) if data is None else NodeSettings(data.resolve())
    settings = replace(
        stored,
        withhold=tuple(dict.fromkeys([*stored.withhold, *(withhold or [])])),
        modules=tuple(dict.fromkeys([*stored.modules, *context.obj])),
        secure=stored.secure if secure_sum is None else secure_sum,
    )
    if action == "personalize":
        import_modules(settings.modules)
        written = [str(path) for path in personalize_node(opened, settings.data)]
        print(json.dumps({"models": written}) if as_json else "\n".join(written))
        return
    write_node_settings(opened, settings)  # which jobs read: of a node that takes part alone
    told = {"node": opened.node, "data": str(settings.data), "withheld": settings.withhold}
    line = f"{opened.node} takes part with {settings.data}; Ctrl-C ends it"
    print(json.dumps(told) if as_json else line, flush=True)
    become_node(opened)


def check_engine() -> None:
    """ConfigError where the engine is not installed."""
    try:
        import nvflare  # noqa: F401, PLC0415
    except ImportError:
        raise ConfigError(
            "a federation across machines needs NVIDIA FLARE: pip install 'flowdup[federation]'"
        ) from None
