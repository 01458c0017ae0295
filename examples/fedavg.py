"""FedAvg from its pieces: a method in 15 lines, and the loop that trains it.

    python examples/fedavg.py

Everything that `flowdup train` adds (presets, checkpoints, reports, other engines) works with a
method like this one; see `my_method.py`.
"""

import torch
from torch import Tensor

from flowdup.client import ClientConfig
from flowdup.data import DataConfig, load_population
from flowdup.engines import EngineConfig, build_engine
from flowdup.evaluation import transductive_accuracy
from flowdup.methods import Batch, Method, MethodContext, Params
from flowdup.methods.base import mean_loss
from flowdup.optimizers import OptimizerConfig
from flowdup.random import Stream
from flowdup.server import ServerConfig, initial_state, train


class FedAvg(Method):
    """One model for all."""

    def __init__(self, context: MethodContext) -> None:
        self.f = context.f

    def init(self, stream: Stream) -> Params:
        return self.f.init(stream)

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return mean_loss(self.f(params, batch.x), batch)

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Params:
        return params


def main(rounds: int = 100) -> float:
    stream = Stream(seed := 0)
    data = DataConfig("digits", points=40, overlap=True, train_clients=100, validation_clients=50)
    population = load_population(data, stream.child("data"))
    method = FedAvg(MethodContext("cnn-small", population.spec, stream))
    local = ClientConfig(batch_size=20, optimizer=OptimizerConfig("sgd", lr=0.1))
    server = ServerConfig(rounds, cohort=10, optimizer=OptimizerConfig("adam", lr=0.01))
    engine = build_engine(EngineConfig(device="cpu"), method, local, population.train, stream)
    state = initial_state(server, method, stream, torch.device("cpu"), torch.float32)
    for done in train(server, method, engine, state, stream):
        state = done.state
        if state.round % 20 == 0:
            print(f"round {state.round}: loss {float(done.loss):.3f}")
    accuracy = transductive_accuracy(engine, state.psi, population.validation).mean or 0.0
    print(f"seed {seed}: {accuracy:.1f} % on validation clients")
    return accuracy


if __name__ == "__main__":
    main()
