"""psi after five rounds is what it was: every method, both engines, against stored numbers.

`python tests/test_reference.py` writes `reference/psi.safetensors` anew, for a change that is meant
to change psi.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import METHODS, STREAM, engine, method
from torch import nn

from flowdup.client import ClientConfig
from flowdup.methods import Params
from flowdup.models import register_model
from flowdup.optimizers import OptimizerConfig
from flowdup.server import ServerConfig, initial_state, train

FILE = Path(__file__).parent / "reference" / "psi.safetensors"
LOCAL = {
    "sgd": OptimizerConfig("sgd", 0.05),
    "momentum": OptimizerConfig("sgd", 0.02, momentum=0.9, weight_decay=1e-3),
    "adam": OptimizerConfig("adam", 1e-3, eps=1e-3),  # a small one enlarges rounding
}
CASES = [(name, "sgd") for name in METHODS] + [
    ("flowdup", local) for local in LOCAL if local != "sgd"
]


def tiny(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.ReLU(),
        nn.Linear(8, outputs),
    )


register_model("tiny", tiny)


def psi_after_five_rounds(kind: str, name: str, local: str) -> Params:
    m = method(name, torch.float64, "tiny")
    client = ClientConfig(2, 10, 0.5, LOCAL[local])
    server = ServerConfig(5, 6, 0.6, True, 0.5, OptimizerConfig("adam", 0.02, eps=1e-3))
    state = initial_state(server, m, STREAM, torch.device("cpu"), torch.float64)
    runner = engine(kind, m, "float64", client)
    *_, last = train(server, m, runner, state, STREAM)
    return last.state.psi


@pytest.mark.parametrize("kind", ["sequential", "batched"])
@pytest.mark.parametrize(("name", "local"), CASES)
def test_psi_is_what_it_was(name: str, local: str, kind: str) -> None:
    stored = load_file(FILE)
    prefix = f"{name}/{local}/"
    wanted = {n.removeprefix(prefix): p for n, p in stored.items() if n.startswith(prefix)}
    found = psi_after_five_rounds(kind, name, local)
    assert found.keys() == wanted.keys()
    for n, p in wanted.items():
        assert (found[n] - p).abs().max() <= 1e-10, n


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {
        f"{name}/{local}/{n}": p.contiguous()
        for name, local in CASES
        for n, p in psi_after_five_rounds("sequential", name, local).items()
    }
    save_file(found, FILE)
