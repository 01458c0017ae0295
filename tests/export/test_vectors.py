"""Known answers of the generator and of P, for other languages: web/test/vectors.json.

`python tests/export/test_vectors.py` writes the file anew, should there be more to know.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowdup.export.bundle import expansion_digest
from flowdup.models import build_network
from flowdup.random import Stream
from flowdup.subspace import Subspace, SubspaceConfig

FILE = Path(__file__).parents[2] / "web/test/vectors.json"
STREAMS: list[list[Any]] = [[0], [1, "theta_0", "0.weight"], [2**40, "café", 7]]


def vectors() -> dict[str, Any]:
    return {
        "streams": [_stream(path) for path in STREAMS],
        "expansions": [_expansion("hashed", 10_000), _expansion("kronecker", 2_000)],
    }


def _stream(path: list[Any]) -> dict[str, Any]:
    stream = Stream(path[0], tuple(path[1:]))
    return {
        "path": path,
        "words": stream.words(9).tolist(),
        "signs": stream.signs(40).tolist(),
        "uniform": stream.uniform(5).tolist(),
        "permutation": stream.permutation(12).tolist(),
        "long_permutation_sha256": _sha256(stream.permutation(100_000).astype("<u4")),
    }


def _expansion(kind: str, k: int) -> dict[str, Any]:
    """Of `cnn` on CIFAR-10, seed 3."""
    network = build_network("cnn", (3, 32, 32), 10, torch.nn.Identity())
    found = Subspace(SubspaceConfig(kind, k), network, Stream(3))
    layers = [
        {"name": n, "shape": list(s), "scale": found.scale[n]}
        | ({"constant": 0.0} if n in network.constants else {"bound": network.bound(n)})
        for n, s in network.shapes.items()
    ]
    v = torch.linspace(-1, 1, k)
    theta = torch.cat([w.flatten() for w in found(v).values()])
    return {
        "seed": 3,
        "spec": {"kind": kind, "k": k, "d": found.d, "sha256": expansion_digest(found)},
        "layers": layers,
        "theta_0_sha256": _sha256(found.theta_0.numpy().astype("<f4")),
        "theta_of_linspace": theta[:: found.d // 50].tolist(),
    }


def _sha256(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def test_the_shared_vectors_are_what_python_gives() -> None:
    assert json.loads(FILE.read_text()) == json.loads(json.dumps(vectors()))


if __name__ == "__main__":
    FILE.write_text(json.dumps(vectors(), indent=1) + "\n")
