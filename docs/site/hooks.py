"""What MkDocs does here beside its own: generated parts, and links to files outside docs/.

A link such as `../experiments/demo.toml` works on a code host.  On the site, the file gets a page
of its own (code, Markdown) or is copied (results), so that the site is complete without a network.
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generated import GENERATED
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<=\]\()(?P<path>\.\./[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
_MARK = re.compile(r"<!-- generated: (\S+) -->")
_LANGUAGES = {".py": "python", ".toml": "toml"}
_FROM_ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//")


def on_files(files: Files, config: Any) -> Files:
    """Add a page or a copy of every file outside docs/ that a page links to."""
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    for file in waiting:  # which grows: a page that is added may link to others
        for match in _LINK.finditer(file.content_string):
            path = _target(file, match["path"])
            if path and files.get_file_from_path(_uri(path)) is None:
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
    """Refuse a page that loads anything from elsewhere."""
    for file in Path(config.site_dir).rglob("*.html"):
        if found := _FROM_ELSEWHERE.search(file.read_text()):
            raise PluginError(f"{file} loads from the network: {found[0]}")


def _target(file: File, link: str) -> Path | None:
    """The file outside docs/ that a link means, or None."""
    here = _origin(file).parent
    path = (here / link).resolve()
    inside = path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT)
    return None if inside or not path.is_file() else path


def _origin(file: File) -> Path:
    """Where a page's text stands in the checkout."""
    start = "files/"
    if file.src_uri.startswith(start):
        return ROOT / file.src_uri.removeprefix(start)
    return ROOT / "docs" / file.src_uri


def _uri(path: Path) -> str:
    """Where a file outside docs/ stands on the site."""
    name = path.relative_to(ROOT).as_posix()
    return f"files/{name}.md" if path.suffix in _LANGUAGES else f"files/{name}"


def _added(path: Path, config: Any) -> File:
    uri = _uri(path)
    if path.suffix in _LANGUAGES:
        code = f"````{_LANGUAGES[path.suffix]}\n{path.read_text()}````"
        text = f"# {path.relative_to(ROOT)}\n\n{code}\n"
        return File.generated(config, uri, content=text)
    return File.generated(config, uri, abs_src_path=str(path))
