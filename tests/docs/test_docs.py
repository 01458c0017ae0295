"""README.md and docs/: every block runs, and everything in the reference has a description."""

import ast
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doc_blocks import FENCE, SMALLER, Block, commands, read_blocks, run_page

import flowdup
from flowdup import FlowdupError

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): read_blocks(path)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
INDENTED = re.compile(r"\n\n {4}(?![ *|-]|options)\S")
RUNNABLE = ("bash", "python", "toml")
ALL = [block for blocks in PAGES.values() for block in blocks]


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks])
def test_every_block_of_a_page_runs(page: str, tmp_path: Path) -> None:
    wanted = [b for b in PAGES[page] if b.language in RUNNABLE and not b.reason]
    assert run_page(PAGES[page], tmp_path) == len(wanted)


def test_there_are_many_blocks_and_few_are_not_run() -> None:
    wanted = [block for block in ALL if block.language in RUNNABLE]
    left_out = [block for block in wanted if block.reason]
    assert len(wanted) > 60
    assert all(block.title for block in wanted if block.language == "toml")
    assert len(left_out) <= 10
    assert all(len(block.reason.split()) > 2 or block.reason == "downloads" for block in left_out)


def test_every_block_says_what_it_is() -> None:
    """A block in another language, or one that is only indented, would never be run."""
    for block in ALL:
        assert block.language in (*RUNNABLE, "text"), block
    for page in PAGES:
        text = FENCE.sub("", (ROOT / page).read_text())
        assert "```" not in text, f"{page} has a fence that is not understood"
        assert not INDENTED.search(text), f"{page} has a block that is only indented"


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_of_a_page_leads_to_a_file(page: str) -> None:
    """As on a code host; the site checks its own, and anchors."""
    text = FENCE.sub("", (ROOT / page).read_text())
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    assert not [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]


def test_a_file_that_a_page_shows_is_used_by_a_later_block() -> None:
    for page, blocks in PAGES.items():
        for number, block in enumerate(blocks):
            name = block.title.removesuffix(".py")
            later = [other.text for other in blocks[number + 1 :] if not other.title]
            assert not name or any(name in text for text in later), f"{page}: {block.title}"


def test_what_is_made_smaller_is_there() -> None:
    for large in SMALLER:
        assert any(re.search(large, block.text) for block in ALL), large


BROKEN = {
    "python": "import flowdup\nflowdup.load_config('digits').no_such_setting\n",
    "bash": "flowdup methods\nflowdup train digits --out run --set server.no_such_setting=1\n",
    "toml": "[server]\nno_such_setting = 1\n",
}


@pytest.mark.parametrize("language", BROKEN)
def test_a_broken_block_fails(language: str, tmp_path: Path) -> None:
    title = "mine.toml" if language == "toml" else ""
    block = Block("page.md", 7, language, title, BROKEN[language])
    with pytest.raises((AssertionError, FlowdupError), match="no_such_setting"):
        run_page([block], tmp_path)


def test_blocks_are_read_with_their_marks() -> None:
    marked = [block for block in PAGES["docs/howto/own-data.md"] if block.reason]
    assert [block.language for block in marked] == ["python"]
    with pytest.raises(AssertionError, match="cannot run 'rm -r /'"):
        list(commands("rm -r /\n"))


ENTRY = re.compile(r"^::: (?P<name>[\w.]+)\n(?P<options>(?: {4}.*\n)*)", re.MULTILINE)


def entries() -> Iterator[tuple[str, bool]]:
    """What the pages of the reference list, and whether with what is inside."""
    for page in sorted((ROOT / "docs/reference").glob("*.md")):
        for entry in ENTRY.finditer(page.read_text()):
            yield entry["name"], "members: false" not in entry["options"]


def definition(name: str) -> tuple[Path, ast.AST]:
    """The file and the syntax tree of a module, class or function."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT / "src" / Path(*parts[:end])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                node: ast.AST = ast.parse(file.read_text())
                for part in parts[end:]:
                    node = next(n for n in public(node) if n.name == part)
                return file, node
    raise AssertionError(f"there is no {name}")


Definition = ast.FunctionDef | ast.ClassDef


def public(node: ast.AST) -> list[Definition]:
    body = getattr(node, "body", [])
    return [n for n in body if isinstance(n, Definition) and not n.name.startswith("_")]


def undescribed(node: ast.AST, name: str, inside: bool = True) -> Iterator[str]:
    """Public names without a docstring."""
    assert isinstance(node, ast.Module | Definition)
    if not ast.get_docstring(node):
        yield name
    if inside and not isinstance(node, ast.FunctionDef):
        for each in public(node):
            yield from undescribed(each, f"{name}.{each.name}")


def test_every_public_name_in_the_reference_has_a_docstring() -> None:
    found = list(entries())
    assert len(found) > 35
    missing = [m for name, all_ in found for m in undescribed(definition(name)[1], name, all_)]
    assert not missing


def own_names(owner: Any, module: str) -> Iterator[tuple[str, Any]]:
    """Public classes and functions that a module, or a class of it, defines."""
    for name, value in vars(owner).items():
        what = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        defined = inspect.isclass(what) or inspect.isfunction(what)
        if defined and not name.startswith("_") and what.__module__ == module:
            yield name, what


def bare_names(module: ModuleType) -> Iterator[str]:
    """Without a docstring of their own or, for a method, of what it overrides."""
    for name, what in own_names(module, module.__name__):
        generated = f"{name}("  # by dataclasses and named tuples
        if not what.__doc__ or what.__doc__.startswith(generated):
            yield f"{module.__name__}.{name}"
        if inspect.isclass(what):
            for inner, _ in own_names(what, module.__name__):
                if not inspect.getdoc(getattr(what, inner)):
                    yield f"{module.__name__}.{name}.{inner}"


NOT_HERE = ("flowdup.federation.", "flowdup.accelerate.kernels")  # need NVIDIA FLARE, Triton


def test_every_public_name_has_a_docstring() -> None:
    names = [m.name for m in pkgutil.walk_packages(flowdup.__path__, "flowdup.")]
    names = [n for n in names if not n.endswith("__main__")]
    assert len(names) > 100
    bare = [b for n in names if not n.startswith(NOT_HERE) for b in bare_names(import_module(n))]
    read = [n for n in names if n.startswith("flowdup.federation.")]
    bare += [b for n in read for b in undescribed(definition(n)[1], n)]
    assert not bare


def test_a_bare_name_is_noticed_and_an_override_is_not_bare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("odd")
    monkeypatch.setitem(sys.modules, "odd", module)
    code = "class A:\n def f(self): 'F.'\n def g(self): 0\nclass B(A):\n 'B.'\n def f(self): 0\n"
    exec(code, module.__dict__)
    assert list(bare_names(module)) == ["odd.A", "odd.A.g"]


def test_a_name_without_a_docstring_is_noticed() -> None:
    tree = ast.parse('"""A module."""\nclass A:\n    """A."""\n    def f(self): ...\n')
    assert list(undescribed(tree, "a")) == ["a.A.f"]


def test_every_public_name_of_the_package_is_in_the_reference() -> None:
    listed = {name for name, _ in entries()}
    tree = ast.parse((ROOT / "src/flowdup/__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "flowdup.version":
            for alias in node.names:
                there = any(n.endswith(f".{alias.name}") or defines(n, alias.name) for n in listed)
                assert there, f"flowdup.{alias.name} is not in the reference"


def defines(module: str, name: str) -> bool:
    return name in [node.name for node in public(definition(module)[1])]
