"""Small federations for tests: ragged clients, labeled and unlabeled mixed, in any precision."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flowdup.client import ClientConfig
from flowdup.data import ClientData, InputSpec, Population
from flowdup.engines import Engine, EngineConfig, build_engine
from flowdup.messages import Task
from flowdup.methods import Method, MethodConfig, MethodContext, Params
from flowdup.random import Stream

SPEC = InputSpec((1, 8, 8), "uint8", 4, (0.3,), (0.4,))
STREAM = Stream(7)
SUBSPACE = {"k": 60}
METHODS: dict[str, dict[str, Any]] = {
    "flowdup": {
        "name": "flowdup",
        "regularization": 1e-2,
        "subspace": SUBSPACE,
        "hypernetwork": {"embedding": 12, "hidden": 10},
    },
    "flowdup-hashed": {
        "name": "flowdup",
        "reduction": "sum",
        "subspace": SUBSPACE | {"kind": "hashed"},
        "hypernetwork": {"embedding": 12, "hidden": 10, "backbone": "mlp"},
    },
    "flowdup-identity": {
        "name": "flowdup",
        "subspace": {"kind": "identity", "k": 0},
        "hypernetwork": {"embedding": 12, "hidden": 4, "backbone": "mlp", "normalize": False},
    },
    "flowdup-fixed": {
        "name": "flowdup",
        "learn_psi_r": False,
        "regularization": 1e-2,
        "subspace": SUBSPACE,
        "hypernetwork": {"embedding": 12, "hidden": 10},
    },
    "flowdup-plus": {
        "name": "flowdup-plus",
        "correction": "em",
        "regularization": 1e-2,
        "head": 0.3,
        "train_theta": True,
        "pseudo_labels": True,
        "teacher": {"threshold": 0.3, "warm_up": 0},
        "global_loss": 0.7,
        "subspace": SUBSPACE,
        "hypernetwork": {"embedding": 12, "hidden": 10, "pooling": "mean-std"},
    },
    "flowdup-self-taught": {
        "name": "flowdup-plus",
        "correction": "em",
        "regularization": 1e-2,
        "train_theta": False,
        "pseudo_labels": True,
        "personal_teacher": True,
        "teacher": {"threshold": 0.3, "warm_up": 0},
        "subspace": SUBSPACE,
        "hypernetwork": {"embedding": 12, "hidden": 10},
    },
    "flowdup-corrected": {
        "name": "flowdup",
        "correction": "em",
        "subspace": SUBSPACE,
        "hypernetwork": {"embedding": 12, "hidden": 10},
    },
    "fedavg": {"name": "fedavg"},
    "fedavg-la": {"name": "fedavg-la"},
    "fedavg-pseudo": {"name": "fedavg-pseudo", "teacher": {"threshold": 0.3, "warm_up": 0}},
    "fedprox": {"name": "fedprox", "mu": 0.5, "period": 2},
    "ld-fedavg": {"name": "ld-fedavg", "subspace": SUBSPACE},
    "fedtta": {"name": "fedtta", "inner_lr": 0.1, "batch_size": 10},
    "fedavg-tent": {"name": "fedavg-tent", "steps": 2, "inner_lr": 0.1, "chunk": 10},
    "fedavg-em": {"name": "fedavg-em", "steps": 20, "chunk": 10},
    "lame": {"name": "lame", "neighbors": 3, "steps": 4, "chunk": 10},
    "atp": {"name": "atp", "chunk": 10},
    "flux": {"name": "flux", "clusters": 3, "chunk": 10},
    "arm-cml": {"name": "arm-cml", "channels": 2, "hidden": 4, "kernel": 3, "chunk": 10},
    "pefll": {"name": "pefll", "hypernetwork": {"embedding": 12, "hidden": 4, "layers": 2}},
    "odpfl-hn": {"name": "odpfl-hn", "hypernetwork": {"embedding": 6, "hidden": 4}},
}


def client(number: int, points: int, labeled: bool = True) -> ClientData:
    """Images with a bright quadrant that tells their class, rotated by the client's number."""
    draw = Stream(11).child("client", number)
    y = draw.child("y").integers(points, 4)
    x = draw.child("x").integers(points * 64, 90).reshape(points, 1, 8, 8)
    for image, label in zip(x, y, strict=True):
        row, column = divmod(int(label), 2)
        image[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 150
    turned = np.rot90(x, number, (2, 3)).astype(np.uint8).copy()
    labels = torch.from_numpy(y) if labeled else None
    return ClientData(
        torch.from_numpy(turned), labels, f"client-{number}", {"rotation": number % 4}
    )


def ragged_clients() -> list[ClientData]:
    """Full, odd, short and single-point batches, with labels, without, and with some."""
    sizes = [20, 13, 1, 7, 33, 2, 10, 24]
    clients = [client(i, n, labeled=i % 3 != 1) for i, n in enumerate(sizes)]
    some = clients[6]
    assert some.y is not None
    partly = torch.where(torch.arange(10) < 5, some.y, -1)
    clients[6] = ClientData(some.x, partly, some.name, some.traits)
    return clients


def population() -> Population:
    groups = [[client(i, 20) for i in range(a, a + 8)] for a in (0, 8, 16)]
    return Population(SPEC, *groups)


def method(name: str, dtype: torch.dtype = torch.float32, model: str = "cnn-small") -> Method:
    return MethodConfig.from_table(METHODS[name]).build(
        MethodContext(model, SPEC, STREAM, "cpu", dtype)
    )


def broadcast(method: Method, like: Params) -> Params:
    """What clients are sent besides such a psi in the first round."""
    first = next(iter(like.values()))
    return {n: method.server_state()[n].to(first) for n in method.broadcast}


def first_task(method: Method, psi: Params, clients: int = 1) -> Task:
    """For all of so many clients."""
    return Task(1, psi, broadcast(method, psi), {i: i for i in range(clients)})


def engine(
    kind: str,
    method: Method,
    dtype: str,
    config: ClientConfig,
    clients: Sequence[ClientData] | None = None,
) -> Engine:
    """With the ragged clients, or others."""
    reached = ragged_clients() if clients is None else clients
    return build_engine(EngineConfig(kind, "cpu", dtype), method, config, reached, STREAM)
