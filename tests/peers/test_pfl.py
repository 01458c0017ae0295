"""FedAvg here against FedAvg in Apple's pfl (Granqvist et al., "pfl-research", 2024), which shares
no code with it: `make test-peers`.

Both begin with the same weights and are given the same cohorts and the same points in the same
order.  Cutting them into batches, local training, the mean and the server's step are each side's
own.  pfl settles on PyTorch and on a way to start processes for the whole process when imported;
therefore only this folder imports it.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser, WeightingStrategy
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from small import SPEC, STREAM, client, engine, method
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flowdup.batches import batch_plan
from flowdup.client import ClientConfig
from flowdup.data import ClientData
from flowdup.engines import Roster
from flowdup.methods import Params
from flowdup.optimizers import OptimizerConfig
from flowdup.server import ServerConfig, ServerState, initial_state, sample_cohort, train

ROUNDS, COHORT, BATCH = 3, 5, 10
LOCAL_SGD = OptimizerConfig("sgd", 0.1)
MEAN = OptimizerConfig("sgd", 1.0)  # the server takes the mean of the clients' models


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...] = (20, 13, 1, 7, 33, 2, 10, 24)  # full, short and single-point batches
    local: ClientConfig = field(
        default_factory=lambda: ClientConfig(1, BATCH, clip=0.0, optimizer=LOCAL_SGD)
    )
    central: OptimizerConfig = MEAN

    @property
    def server(self) -> ServerConfig:
        return ServerConfig(ROUNDS, COHORT, optimizer=self.central)

    def clients(self) -> list[ClientData]:
        return [client(number, points) for number, points in enumerate(self.sizes)]

    def start(self) -> ServerState:
        cpu = torch.device("cpu")
        return initial_state(self.server, method("fedavg"), STREAM, cpu, torch.float32)


CASES = {
    "ragged clients": Case(),
    # pfl goes through a client's points in one order, so it gets both epochs as one, which has the
    # same batches where none is short.
    "two epochs": Case(
        (20, 10, 40, 10, 30, 20, 10, 30), ClientConfig(2, BATCH, clip=0.0, optimizer=LOCAL_SGD)
    ),
    "clipped gradients": Case(local=ClientConfig(1, BATCH, clip=0.5, optimizer=LOCAL_SGD)),
    "server momentum": Case(central=OptimizerConfig("sgd", 0.5, momentum=0.9)),
    # Adam's steps are equally long for any gradient far above eps; with a small eps that includes
    # gradients which are little more than rounding.
    "server Adam": Case(central=OptimizerConfig("adam", 0.01, eps=1e-4)),
}


class Classifier(nn.Module):
    """A network as pfl wants it: with a loss and metrics of its own."""

    def __init__(self, psi: Params) -> None:
        super().__init__()
        self.read = SPEC.reader()
        self.f = copy.deepcopy(method("fedavg").f.module).requires_grad_(True)
        self.f.load_state_dict(psi)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.f(self.read(x)), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


def here(case: Case, engine_name: str) -> Params:
    fedavg = method("fedavg")
    runner = engine(engine_name, fedavg, "float32", case.local, case.clients())
    rounds = list(train(case.server, fedavg, runner, case.start(), STREAM))
    assert len(rounds) == ROUNDS
    return rounds[-1].state.psi


def there(case: Case, weighting: type[WeightingStrategy] = WeightByUser) -> Params:
    net = Classifier(case.start().psi)
    model = PyTorchModel(net, torch.optim.SGD, torch_optimizer(case.central, net.parameters()))
    visits = visiting_order(case)
    users = FederatedDataset.from_slices(visits, get_user_sampler("minimize_reuse", list(visits)))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS,
            evaluation_frequency=ROUNDS,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users, [weighting()]),
        model,
        NNTrainHyperParams(
            local_batch_size=case.local.batch_size,
            local_num_epochs=1,
            local_learning_rate=case.local.optimizer.lr,
            local_max_grad_norm=case.local.clip or None,
        ),
        send_metrics_to_platform=False,  # which prints them
    )
    return {name: p.detach() for name, p in net.f.named_parameters()}


def visiting_order(case: Case) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """By round and place in its cohort, in this order: a client's points as we visit them."""
    clients, visits = case.clients(), {}
    everyone = Roster(np.arange(len(clients)), np.arange(0))
    for number in range(1, ROUNDS + 1):
        cohort = sample_cohort(case.server, everyone, False, STREAM.child("cohort", number))
        for position, chosen in enumerate(cohort):
            x, y = clients[chosen].x, clients[chosen].y
            assert y is not None
            orders, local = STREAM.child("order", number), case.local
            plan = batch_plan(orders, position, len(y), local.epochs, local.batch_size)
            order = torch.from_numpy(plan[plan >= 0])
            visits[number, position] = (x[order], y[order])
    return visits


def torch_optimizer(c: OptimizerConfig, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    if c.name == "adam":
        return torch.optim.Adam(parameters, c.lr, (c.beta1, c.beta2), c.eps)
    return torch.optim.SGD(parameters, c.lr, c.momentum)


def distance(a: Params, b: Params) -> float:
    assert a.keys() == b.keys()
    return max((a[n] - b[n]).abs().max().item() for n in a)


@pytest.mark.parametrize("engine_name", ["sequential", "batched"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_three_rounds_of_fedavg_give_the_weights_that_pfl_gives(
    case: Case, engine_name: str
) -> None:
    ours, theirs, start = here(case, engine_name), there(case), case.start().psi
    assert distance(ours, start) > 1e-2
    assert distance(ours, theirs) < 1e-5


def test_a_mean_over_points_instead_of_clients_would_show() -> None:
    case = CASES["ragged clients"]
    assert distance(here(case, "sequential"), there(case, WeightByDatapoints)) > 1e-3
