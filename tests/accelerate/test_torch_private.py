"""flowdup works, slower and with one warning, without any of torch's private names."""

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import missing
import pytest
import torch
from missing import Case
from safetensors.torch import load_file

import flowdup
from flowdup.accelerate import torch_private
from flowdup.accelerate.torch_private import PIECES
from flowdup.errors import ConfigError

SOURCE = Path(flowdup.__file__).parent
TABLE = {n: (p.module, p.attribute, list(p.keywords)) for n, p in PIECES.items()}
ON_A_CPU = {
    *("make_fx", "_loader", "fx_graph_cse", "CompilationUnit", "optimized_execution", "_dynamo")
}
CASES = missing.cases(TABLE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds of `digits` on both engines for every case, each in a process of its own."""
    folder = tmp_path_factory.mktemp("missing")
    environment = {n: v for n, v in os.environ.items() if n != torch_private.SWITCH}
    subprocess.run(
        [sys.executable, missing.__file__, folder, json.dumps(TABLE)], env=environment, check=True
    )
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_without_a_piece_psi_is_the_same_and_one_warning_names_it(
    trained: Path, case: Case
) -> None:
    for engine in missing.ENGINES:
        wanted = load_file(trained / f"undisturbed {engine}.safetensors")
        found = load_file(trained / f"{case.file} {engine}.safetensors")
        assert found.keys() == wanted.keys()
        assert all((found[n] - p).abs().max() <= 1e-5 for n, p in wanted.items())
    asked = {
        "undisturbed": set(),
        "deleted": {case.name},  # the process asks for it itself
        "changed": {case.name},
        "switched-off": {case.name} & ON_A_CPU,
        "plain": {"_dynamo"},  # engine.compile = false needs nothing else
    }[case.way]
    texts = json.loads((trained / f"{case.file}.json").read_text())
    assert len(texts) == len(asked)
    for name, text in zip(asked, texts, strict=True):
        assert f"flowdup does without {name} (torch {torch.__version__}: " in text


def test_the_readme_says_what_happens_without_every_piece() -> None:
    text = (SOURCE / "accelerate" / "README.md").read_text()
    rows = text[text.index("| `FLOWDUP_WITHOUT` |") :].splitlines()
    first = " ".join(row.split("|")[1] for row in rows if row.startswith("|"))
    assert set(PIECES) <= {*re.findall(r"`(\w+)`", first)}


def test_an_unknown_piece_in_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(torch_private.SWITCH, "make_fx, warp")
    with pytest.raises(ConfigError, match="names 'warp', which is no piece: use some of make_fx,"):
        torch_private.switched_off()


def test_options_that_the_compiler_does_not_know_are_left_out() -> None:
    options = torch_private.INDUCTOR_OPTIONS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch_private.known_options(options) == options
    for unknown in ("warp_speed", "triton.warp_speed", "shape_padding.more"):
        with pytest.warns(RuntimeWarning, match=f"does without {unknown}"):
            assert torch_private.known_options(options | {unknown: 1}) == options


def test_what_torchscript_refuses_is_announced_and_left_to_python() -> None:
    source = "def f(x: Tensor):\n    return unknown(x)\n"
    with pytest.warns(RuntimeWarning, match=r"(?s)without TorchScript .*undefined value unknown"):
        assert torch_private.compile_torchscript(source, "f") is None


def test_torchscripts_own_deprecation_is_not_shown_and_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deprecated(source: str) -> torch.jit.CompilationUnit:
        warnings.warn("`torch.jit.CompilationUnit` is deprecated", DeprecationWarning, stacklevel=2)
        warnings.warn("`torch.old` is deprecated", DeprecationWarning, stacklevel=2)
        return unit(source)

    unit = torch.jit.CompilationUnit
    monkeypatch.setattr(torch.jit, "CompilationUnit", deprecated)
    monkeypatch.setattr(torch_private, "_found", {})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = torch_private.compile_torchscript("def f(x: Tensor):\n    return x + 1\n", "f")
        assert run is not None
        assert run(torch.ones(1)).item() == 2
        warnings.warn("`torch.jit.script` is deprecated", DeprecationWarning, stacklevel=1)
    assert [str(w.message) for w in seen] == [
        "`torch.old` is deprecated",
        "`torch.jit.script` is deprecated",
    ]


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    found = {
        (str(file.relative_to(SOURCE)), name)
        for file in SOURCE.rglob("*.py")
        if file.name != "torch_private.py"
        for name in private_names(file.read_text())
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("import torch\ntorch._foreach_copy_([], [])", "torch._foreach_copy_"),
        ("from torch import nn\nnn.modules.x._Norm", "torch.nn.modules.x._Norm"),
        ("import torch.jit as j\nj.script(f)", "torch.jit.script"),
        ("from torch.fx.experimental import x", "torch.fx.experimental.x"),
        ("import_module('torch._dynamo')", "torch._dynamo"),
        ("super()._conv_forward(x)", "super()._conv_forward"),
        ("import torch, triton\ntriton.jit(f)\ntorch.__version__\ntorch.fx.Node", ""),
        ("'torch is a word'", ""),
    ],
)
def test_private_names_are_found_however_they_are_written(source: str, name: str) -> None:
    assert name in private_names(source) if name else not private_names(source)


def private_names(source: str) -> set[str]:
    """Dotted names of torch in a file that are private, experimental or TorchScript's."""
    return {name for name in _names(ast.parse(source)) if _is_private(name)}


def _is_private(name: str) -> bool:
    parts = name.split(".")
    hidden = any(p.startswith("_") and not p.endswith("__") for p in parts[1:])
    return hidden or name.startswith(("torch.jit", "torch.fx.experimental"))


def _names(module: ast.Module) -> Iterator[str]:
    aliases: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            root, *path = ast.unparse(node).split(".")
            if root in aliases or root == "super()":
                yield ".".join([aliases.get(root, root), *path])
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            yield str(node.value)


def test_importing_flowdup_imports_no_kernels_and_no_compiler() -> None:
    """They would make every command slower, and Triton may be missing."""
    code = """
import sys, torch
before = set(sys.modules)
import flowdup
new = set(sys.modules) - before
slow = ("flowdup.accelerate.kernels", "triton", "torch._inductor", "torch._dynamo")
print([name for name in sorted(new) if name.startswith(slow)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
