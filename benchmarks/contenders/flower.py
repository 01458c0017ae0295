"""Flower's simulation engine, on ray: many actors of one thread, or one actor of many.

A node plays whichever client a message names, so that cohorts are everyone's; actors keep the data
and a network from one message to the next.
"""

import os
import time
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from typing import Any

os.environ |= {  # before Flower and ray are imported
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # ray's own choice, 15, would let anything else go first
}

import ray
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from contenders.entry import Entry, Pace
from contenders.program import program, resident, train

client_app = ClientApp()


@cache
def workplace(text: str, threads: int) -> tuple[Any, ...]:
    """What an actor keeps."""
    torch.set_num_threads(threads)
    entry = Entry.from_json(text)
    visits = entry.work.visits(entry.rounds, entry.device)
    return entry.work, program(entry), resident(entry), visits


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    task = message.content["config"]
    work, net, clients, visits = workplace(task["entry"], task["threads"])
    number, order = visits[task["round"] - 1][task["position"]]
    x, y = clients[number]
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(net, x[order], y[order], work)
    weight = MetricRecord({"num-examples": 1})  # the mean over clients, not over points
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": weight})
    return Message(content, reply_to=message)


class Paced(FedAvg):
    def __init__(self, entry: Entry, threads: int, net: Any, pace: Pace) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.entry, self.threads, self.net, self.pace = entry, threads, net, pace

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        cohort = self.entry.work.cohort
        while len(nodes := list(grid.get_node_ids())) < cohort:
            time.sleep(0.1)
        if server_round == 1:
            self.pace.ready(flwr=version("flwr"), ray=ray.__version__)
        task = {"entry": self.entry.to_json(), "threads": self.threads, "round": server_round}
        for position, node in enumerate(nodes):
            content = {"arrays": arrays, "config": ConfigRecord(task | {"position": position})}
            yield Message(RecordDict(content), node, "train")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) < self.entry.work.cohort:
            raise RuntimeError(f"clients failed: {failed or 'no reply'}")
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None

        def psi() -> dict[str, torch.Tensor]:
            self.net.load_state_dict(arrays.to_torch_state_dict())
            return self.net.psi()

        self.pace(psi)
        return arrays, metrics


def run(entry: Entry, pace: Pace) -> None:
    actors = 1 if entry.variant == "threads" else entry.threads
    threads = entry.threads // actors
    gpus = 0 if entry.device == "cpu" else 1
    net = program(entry)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        start = ArrayRecord(net.state_dict())
        Paced(entry, threads, net, pace).start(grid, start, num_rounds=entry.rounds)

    run_simulation(
        server_app,
        client_app,
        num_supernodes=entry.work.cohort,
        backend_config={
            "init_args": {
                "address": "local",
                "num_cpus": entry.threads,
                "num_gpus": gpus,
                "log_to_driver": False,
            },
            "client_resources": {"num_cpus": threads, "num_gpus": gpus / actors},
        },
    )
