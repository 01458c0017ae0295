"""`flowdup serve`: a bundle's page in the browser of this machine."""

import contextlib
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from flowdup.export.page import page_files, write_site
from flowdup.export.server import PageServer


def serve(
    bundle: Annotated[Path, typer.Argument(help="A folder from `flowdup export`.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Write page and bundle here, for any web server, and end.")
    ] = None,
) -> None:
    """Personalise in the browser: serve the page and a bundle, to this machine alone.

    Images that are given to the page stay in it. Ctrl-C ends.
    """
    if out is not None:
        print(f"{out}: {write_site(bundle, out)} files, for any web server")
        return
    with PageServer(page_files(bundle), port) as server:
        print(f"{server.url} shows {bundle}; Ctrl-C ends", flush=True)
        if browser:
            webbrowser.open(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
