"""pfl: FederatedAveraging on a SimulatedBackend (Granqvist et al., "pfl-research", 2024)."""

import os
from importlib.metadata import version
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from contenders.entry import Entry, Pace
from contenders.program import program, resident


class Lap(TrainingProcessCallback):
    def __init__(self, pace: Pace) -> None:
        self.pace = pace

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.pace.ready(pfl=version("pfl"))
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.pace(model.pytorch_model.psi)
        return False, Metrics()


def run(entry: Entry, pace: Pace) -> None:
    os.environ["PFL_PYTORCH_DEVICE"] = entry.device
    work, net, clients = entry.work, program(entry), resident(entry)

    @torch.no_grad()
    def metrics(x: Tensor, y: Tensor) -> dict[str, Weighted]:  # asked for in the first round only
        return {"loss": Weighted(net.loss(x, y).item() * len(y), len(y))}

    net.metrics = metrics
    queue = (visit for cohort in work.visits(entry.rounds, entry.device) for visit in cohort)

    def points(visit: tuple[int, Tensor]) -> Any:
        number, order = visit
        return Dataset([t[order] for t in clients[number]], user_id=str(number))

    users = FederatedDataset(points, lambda: next(queue))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=entry.rounds,
            evaluation_frequency=entry.rounds,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users, [WeightByUser()]),
        PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0)),
        NNTrainHyperParams(
            local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=work.lr
        ),
        callbacks=[Lap(pace)],
        send_metrics_to_platform=False,  # which prints them
    )
