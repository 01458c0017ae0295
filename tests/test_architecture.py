"""The house: a lower room never imports a higher one, and a file has one subject."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import flowdup

SOURCE = Path(flowdup.__file__).parent
ROOMS = [  # from low to high; docs/architecture.md shows the same
    *("version", "errors", "strict_json", "memory", "settings", "files", "interruption", "devices"),
    *(
        "metrics_file",
        "provenance",
        "stored_tensors",
        "tree",
        "random",
        "params",
        "autograd",
        "registry",
        "certificate",
    ),
    *("data", "models", "rank_one", "subspace", "hypernetwork", "prior", "methods"),
    *(
        "augmentation",
        "batches",
        "messages",
        "wire",
        "aggregation",
        "privacy",
        "secure_sum",
        "optimizers",
        "client",
    ),
    *("accelerate", "engines", "server"),
    *(
        "federation_spec",
        "checkpoint",
        "metrics",
        "evaluation",
        "calibration",
        "familiarity",
        "personal_model",
        "personalize",
        "export",
        "cost",
        "config",
        "setting_list",
        "law_cases",
        "laws",
    ),
    *("report", "run", "progress", "campaign", "federation", "commands", "cli"),
    *("__init__", "__main__"),
]
LONGEST = 350  # lines


def room(module: str) -> str:
    """The first part of a module's name inside the package."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(path: Path) -> Iterator[str]:
    """What a file imports of the package, inside functions too; `from flowdup import x` is x."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = node.module == "flowdup"
            names = [f"flowdup.{a.name}" for a in node.names] if inside else [node.module]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "flowdup")


def files() -> dict[Path, str]:
    found = {p: p.relative_to(SOURCE).parts[0].removesuffix(".py") for p in SOURCE.rglob("*.py")}
    assert len(found) > 60
    return found


def upward(path: Path, own: str) -> list[str]:
    return [name for name in imports(path) if ROOMS.index(room(name)) > ROOMS.index(own)]


def test_every_room_has_its_place() -> None:
    assert set(files().values()) == set(ROOMS)


def test_a_lower_room_never_imports_a_higher_one() -> None:
    wrong = {str(path): found for path, own in files().items() if (found := upward(path, own))}
    assert not wrong


def test_only_the_federation_imports_its_engine() -> None:
    def imports_engine(path: Path) -> bool:
        return bool(re.search(r"^\s*(import|from) nvflare\b", path.read_text(), re.MULTILINE))

    found = {own for path, own in files().items() if imports_engine(path)}
    assert found == {"federation", "commands"}
    asks = [p.name for p, own in files().items() if own == "commands" and imports_engine(p)]
    assert asks == ["node.py"]  # whether it is installed at all


def test_an_import_of_a_higher_room_would_be_seen(tmp_path: Path) -> None:
    for text in ("from flowdup.engines.base import Engine", "import flowdup.cli"):
        (tmp_path / "client.py").write_text(f"def f():\n    {text}\n")
        assert upward(tmp_path / "client.py", "client")


def test_a_room_imports_whole_rooms_without_circles() -> None:
    """Files of one room may import each other, in one direction."""
    graph = {
        ".".join(("flowdup", *p.relative_to(SOURCE).with_suffix("").parts)): set(imports(p))
        for p in files()
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module in graph and module not in done:
            for other in graph[module]:
                visit(other, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_file_outside_the_room_for_speed_is_longer_than_a_sitting() -> None:
    long = {
        str(path): lines
        for path, own in files().items()
        if own != "accelerate" and (lines := len(path.read_text().splitlines())) > LONGEST
    }
    assert not long
