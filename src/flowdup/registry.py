"""Names for methods, models, data sources and metrics, the user's own among them.

A user's file registers by `flowdup.register_method` and its like, and is imported by
`flowdup --import FILE`.  An installed package does so by itself: its entry point in the group
`flowdup` names a module that registers when it is imported.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Generic, TypeVar

from flowdup.errors import ConfigError, FlowdupError, shorten
from flowdup.settings import nearest

Item = TypeVar("Item")

_scanned = False  # whether installed packages were looked for, once


class Registry(Mapping[str, Item], Generic[Item]):
    """Items of one kind by name.  Asking for a name, or for all, imports installed packages."""

    def __init__(self, kind: str, items: Mapping[str, Item]) -> None:
        self.kind, self.known = kind, dict(items)

    def register(self, name: str, item: Item) -> None:
        """Add an item; ConfigError if the name belongs to another one."""
        if self.known.get(name, item) != item:
            raise ConfigError(f"a {self.kind} named '{name}' exists already: choose another name")
        self.known[name] = item

    def unregister(self, name: str) -> None:
        """Forget a name, to register it anew."""
        del self.known[name]

    def find(self, name: object) -> Item:
        """The item, or a ConfigError that says which names there are."""
        if not isinstance(name, str) or name not in self:
            near = nearest(shorten(name), list(self))
            raise ConfigError(
                f"unknown {self.kind} '{shorten(name)}'{near}: use one of {', '.join(self)}, or "
                "name the file that registers it with --import"
            )
        return self[name]

    def __getitem__(self, name: str) -> Item:
        if name not in self.known:
            import_installed()
        return self.known[name]

    def __iter__(self) -> Iterator[str]:
        import_installed()
        return iter(self.known)

    def __len__(self) -> int:
        return len(list(iter(self)))


def import_modules(modules: Sequence[str]) -> None:
    """Import a user's modules by name, from the current folder too, or by the path of a file."""
    for module in modules:
        try:
            if module.endswith(".py"):
                _import_file(Path(module))
                continue
            if "" not in sys.path:
                sys.path.insert(0, "")
            importlib.import_module(module)
        except FlowdupError:
            raise
        except Exception as error:  # whatever a user's module may raise
            raise ConfigError(
                f"importing {module} failed with {error!r}: mend the module"
            ) from error


def import_installed() -> None:
    """Import what installed packages offer, once; a broken one is named."""
    global _scanned  # noqa: PLW0603
    if _scanned:
        return
    _scanned = True
    for point in entry_points(group="flowdup"):
        try:
            point.load()
        except Exception as error:  # whatever a package may raise
            raise ConfigError(
                f"the installed plugin '{point.name}' failed with {error!r}: mend or remove it"
            ) from error


def _import_file(path: Path) -> None:
    """As a module of the file's name, which no other module may have."""
    name, path = path.stem, path.resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path} to import: check the path")
    if name in sys.modules:
        if getattr(sys.modules[name], "__file__", None) == str(path):
            return
        raise ConfigError(f"{path} has the name of another module, '{name}': rename the file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as an import does: dataclasses look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
