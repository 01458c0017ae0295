"""The command `flowdup node`: take part in a federation with one's own data, which stay here."""

import json
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
        bool, typer.Option(help="Send updates in secure sums alone, or not at all.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Take part in a federation, or make this node's models from the psi that it has."""
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

    opened = open_kit(kit)
    if data is None and not opened.settings.is_file():
        raise ConfigError("say where this node's clients are: --data FOLDER")
    if data is not None and not data.exists():
        raise ConfigError(f"there is no {data}: give the folder or table of this node's clients")
    if odd := set(withhold or []) - {*WITHHELD}:
        raise ConfigError(f"'{min(odd)}' cannot be withheld: use {' or '.join(WITHHELD)}")
    if data is not None:
        own = NodeSettings(data, tuple(withhold or []), tuple(context.obj), secure_sum)
        write_node_settings(opened, own)
    settings = read_node_settings(opened)
    if action == "personalize":
        import_modules(settings.modules)
        written = [str(path) for path in personalize_node(opened, settings.data)]
        print(json.dumps({"models": written}) if as_json else "\n".join(written))
        return
    if action:
        raise ConfigError(f"a node cannot '{action}': use 'personalize', or nothing to take part")
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
