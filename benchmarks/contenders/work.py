"""The work: clients, cohorts, the order in which points are visited, and psi at the start.

All of it comes from streams and seeds, so every contender has the same without a file between them.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowdup.batches import batch_plan
from flowdup.client import ClientConfig
from flowdup.data import ClientData, InputSpec
from flowdup.engines import Roster
from flowdup.methods import Method, MethodConfig, MethodContext
from flowdup.optimizers import OptimizerConfig
from flowdup.params import Params
from flowdup.random import Stream
from flowdup.server import ServerConfig, sample_cohort

STREAM = Stream(0)
LEAF = (19, 584)  # points of FEMNIST's smallest and largest writer
LEAF_SPREAD = 0.5  # deviation of the logarithm


@dataclass(frozen=True)
class Work:
    method: str = "fedavg"  # or flowdup
    model: str = "cnn"  # of f and of h1
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    classes_per_client: int = 2
    points: int = 100  # of each client; the median if ragged
    ragged: bool = False  # sizes spread like those of LEAF's FEMNIST
    clients: int = 100
    cohort: int = 20
    batch: int = 50
    k: int = 10_000
    lr: float = 0.05

    @classmethod
    def femnist(cls, **other: Any) -> "Work":
        """FedAvg on clients of FEMNIST's shape."""
        few: Any = {"shape": (1, 28, 28), "classes": 62, "classes_per_client": 62, "points": 180}
        return cls("fedavg", ragged=True, **few | other)

    @property
    def inputs(self) -> InputSpec:
        channels = self.shape[0]
        return InputSpec(self.shape, "uint8", self.classes, (0.5,) * channels, (0.25,) * channels)

    @property
    def local(self) -> ClientConfig:
        return ClientConfig(1, self.batch, clip=0.0, optimizer=OptimizerConfig("sgd", self.lr))

    def server(self, rounds: int) -> ServerConfig:
        mean = OptimizerConfig("sgd", 1.0)  # psi becomes the mean of the clients' psi
        return ServerConfig(rounds, self.cohort, replacement=False, optimizer=mean)

    def table(self) -> dict[str, object]:
        if self.method == "fedavg":
            return {"name": "fedavg"}
        return {
            "name": "flowdup",
            "subspace": {"k": self.k},
            "hypernetwork": {"embedding": 256, "hidden": 100},
        }

    def build(self, device: str = "cpu", compute: torch.dtype | None = None) -> Method:
        parts = MethodContext(self.model, self.inputs, STREAM, device, compute=compute)
        return MethodConfig.from_table(self.table()).build(parts)

    def start(self, method: Method, device: str = "cpu") -> Params:
        return {n: p.to(device) for n, p in method.init(STREAM.child("psi")).items()}

    def sizes(self) -> list[int]:
        if not self.ragged:
            return [self.points] * self.clients
        normal = NormalDist(math.log(self.points), LEAF_SPREAD)
        shares = (STREAM.child("sizes").uniform(self.clients).astype(float) + 1) / 2
        return [round(min(max(math.exp(normal.inv_cdf(s)), LEAF[0]), LEAF[1])) for s in shares]

    def population(self) -> list[ClientData]:
        return [self._client(number, points) for number, points in enumerate(self.sizes())]

    def _client(self, number: int, points: int) -> ClientData:
        draw = torch.Generator().manual_seed(number)
        x = torch.randint(256, (points, *self.shape), generator=draw, dtype=torch.uint8)
        own = torch.randperm(self.classes, generator=draw)[: self.classes_per_client]
        return ClientData(x, own[torch.randint(len(own), (points,), generator=draw)])

    def visits(self, rounds: int, device: str = "cpu") -> list[list[tuple[int, Tensor]]]:
        """By round and position: a client, and its points in the order that flowdup visits them in.

        Other contenders get these ready-made; flowdup draws them in each round.
        """
        server, sizes = self.server(rounds), self.sizes()
        everyone = Roster(np.arange(self.clients), np.arange(0))
        return [
            [
                (chosen, self._order(number, sizes[chosen], position).to(device))
                for position, chosen in enumerate(
                    sample_cohort(server, everyone, False, STREAM.child("cohort", number))
                )
            ]
            for number in range(1, rounds + 1)
        ]

    def _order(self, number: int, points: int, position: int) -> Tensor:
        orders, local = STREAM.child("order", number), self.local
        plan = batch_plan(orders, position, points, local.epochs, local.batch_size)
        return torch.from_numpy(plan[plan >= 0])
