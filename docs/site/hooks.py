"""What MkDocs does here beside its own: generated parts, and links to files outside docs/.

A link such as `../experiments/demo.toml` works on a code host.  On the site, the file gets a page
of its own (code, Markdown) or is copied (results), so that the site is complete without a network.
"""

import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).parent))

from generated import GENERATED
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
_LEADS_TO = re.compile(r"(?:href|src)=\"(?P<path>[^\"#?:]+)[\"#?]")
_MARK = re.compile(r"<!-- generated: (\S+) -->")
_LANGUAGES = {".py": "python", ".toml": "toml"}
_FROM_ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//")


def on_files(files: Files, config: Any) -> Files:
    """Add a page or a copy of every file outside docs/ that a page links to."""
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    for file in waiting:  # which grows: a page that is added may link to others
        for match in _LINK.finditer(file.content_string):
            path = _target(file, match["path"])
            if path and not _is_page(path) and files.get_file_from_path(_uri(path)) is None:
                new = _added(path, config)
                files.append(new)
                waiting += [new] if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill in what the program says of itself, and lead links to files outside docs/."""

    def lead(match: re.Match[str]) -> str:
        path = _target(page.file, match["path"])
        if path is None:
            return match[0]
        up = "../" * page.file.src_uri.count("/")
        return f"{up}{_uri(path)}{match['anchor'] or ''}"

    filled = _MARK.sub(lambda match: GENERATED[match[1]](), markdown)
    return _LINK.sub(lead, filled)


def on_post_build(config: Any) -> None:
    """Refuse a page that loads anything from elsewhere, or leads to a file that is not there."""
    for file in Path(config.site_dir).rglob("*.html"):
        text = file.read_text()
        if found := _FROM_ELSEWHERE.search(text):
            raise PluginError(f"{file} loads from the network: {found[0]}")
        paths = {match["path"] for match in _LEADS_TO.finditer(text)}
        lost = [path for path in paths if not (file.parent / unquote(path)).exists()]
        if lost and file.name != "404.html":  # whose links begin at a server's root
            raise PluginError(f"{file} leads to {lost[0]}, which is not there")


def _target(file: File, link: str) -> Path | None:
    """The file that a link means; None if it is not there, or stays inside docs/."""
    origin = _origin(file)
    path = (origin.parent / link).resolve()
    stays = _is_page(origin) and _is_page(path)
    return None if stays or not path.is_relative_to(ROOT) or not path.is_file() else path


def _origin(file: File) -> Path:
    """Where a page's text stands in the checkout."""
    start = "files/"
    if file.src_uri.startswith(start):
        return ROOT / file.src_uri.removeprefix(start)
    return ROOT / "docs" / file.src_uri


def _is_page(path: Path) -> bool:
    return path.is_relative_to(ROOT / "docs")


def _uri(path: Path) -> str:
    """Where a file stands on the site."""
    if _is_page(path):
        return path.relative_to(ROOT / "docs").as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"files/{name}.md" if path.suffix in _LANGUAGES else f"files/{name}"


def _added(path: Path, config: Any) -> File:
    uri = _uri(path)
    if path.suffix in _LANGUAGES:
        code = f"````{_LANGUAGES[path.suffix]}\n{path.read_text()}````"
        text = f"# {path.relative_to(ROOT)}\n\n{code}\n"
        return File.generated(config, uri, content=text)
    return File.generated(config, uri, abs_src_path=str(path))
