"""Train with a piece of torch taken away; run by `test_torch_private.py` in a process of its own.

`python missing.py FOLDER PIECES`, with flowdup's table of pieces as JSON: name to module, attribute
and keywords.  Every case has a child of its own, since a piece is looked up once per process; psi
and the warnings of each are written into the folder.
"""

import importlib
import inspect
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import sklearn.datasets  # noqa: F401  (imported once for all children)
import torch
from safetensors.torch import load_file, save_file

Piece = tuple[str, str, list[str]]
ENGINES = ("sequential", "batched")
SETTINGS = [
    "data.train_clients=6",
    "data.validation_clients=0",
    "data.test_clients=0",
    "server.rounds=3",
    "server.cohort=3",
    "engine.device=cpu",
]
SLOW = ["torch._inductor.pattern_matcher"]  # to import, and imported by torch while it traces


class Case(NamedTuple):
    way: str  # how the piece is taken away
    name: str = ""
    keyword: str = ""
    settings: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return " ".join(filter(None, self[:3]))


def cases(pieces: dict[str, Piece]) -> list[Case]:
    return [
        Case("undisturbed"),
        *(Case("deleted", name) for name in pieces),
        *(Case("changed", name, word) for name, (_, _, words) in pieces.items() for word in words),
        *(Case("switched-off", name) for name in pieces),
        Case("plain", "all", settings=("engine.compile=false",)),
    ]


def take_away(module: str, attribute: str) -> Callable[[], None]:
    """Remove the piece from torch; what puts it back is returned."""
    if not attribute:
        before = sys.modules.get(module)
        sys.modules[module] = None  # type: ignore[assignment]

        def restore() -> None:
            del sys.modules[module]
            if before:
                sys.modules[module] = before

        return restore
    home = importlib.import_module(module)
    found = getattr(home, attribute)
    delattr(home, attribute)
    return lambda: setattr(home, attribute, found)


def take_keyword(module: str, attribute: str, keyword: str) -> Callable[[], None]:
    """Leave a function that does not know a keyword any more."""
    home = importlib.import_module(module)
    found = getattr(home, attribute)
    parameters = dict(inspect.signature(found).parameters)
    del parameters[keyword]

    def changed(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("it is called with a keyword that it lacks")

    changed.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    setattr(home, attribute, changed)
    return lambda: setattr(home, attribute, found)


def run(case: Case, pieces: dict[str, Piece], folder: Path) -> None:
    if case.way in ("switched-off", "plain"):
        os.environ["FLOWDUP_WITHOUT"] = ",".join(pieces) if case.way == "plain" else case.name
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        restore = None
        if case.way == "deleted":
            restore = take_away(*pieces[case.name][:2])
        elif case.way == "changed":
            restore = take_keyword(*pieces[case.name][:2], case.keyword)
        import flowdup  # noqa: PLC0415  (while the piece is absent)
        from flowdup.accelerate import torch_private  # noqa: PLC0415

        if restore:
            assert torch_private.look_up(case.name) is None
            restore()  # torch itself may need it
        for engine in ENGINES:
            psi = train(flowdup, [*SETTINGS, *case.settings, f"engine.name={engine}"])
            save_file(psi, folder / f"{case.file} {engine}.safetensors")
    texts = [f"{w.category.__name__}: {w.message}" for w in seen]
    (folder / f"{case.file}.json").write_text(json.dumps(texts))


def train(flowdup: Any, settings: list[str]) -> dict[str, torch.Tensor]:
    config = flowdup.load_config("digits", settings)
    with tempfile.TemporaryDirectory() as folder:
        list(flowdup.train_run(config, folder))
        (file,) = Path(folder, "checkpoint").glob("*.safetensors")
        return {n: p for n, p in load_file(file).items() if n.startswith("psi/")}


def main(folder: Path, pieces: dict[str, Piece]) -> None:
    torch.set_num_threads(1)
    for module in [*(module for module, _, _ in pieces.values()), *SLOW]:
        with suppress(ImportError):  # torch for the CPU comes without Triton
            importlib.import_module(module)
    assert "flowdup" not in sys.modules
    failed = []
    for case in cases(pieces):
        child = os.fork()
        if child == 0:
            try:
                run(case, pieces, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            failed.append(case.file)
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
