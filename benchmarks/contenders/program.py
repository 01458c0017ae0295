"""The methods as ordinary modules with a loss, which any PyTorch program can train."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, layer_norm, relu

from contenders.entry import Entry
from contenders.work import Work
from flowdup.models.cnn import cnn, cnn_small
from flowdup.models.resnet import resnet18
from flowdup.params import Params, prefixed, strip_prefix

NETWORKS = {"cnn": cnn, "cnn-small": cnn_small, "resnet18": resnet18}
Program = Any  # an nn.Module with a loss(x, y) and with psi()


class Classifier(nn.Module):
    """FedAvg's: one network."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.read = work.inputs.reader()
        self.f = NETWORKS[work.model](work.shape, work.classes)
        self.load_state_dict(prefixed("f.", work.start(work.build())))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.f(self.read(x)), y)

    def psi(self) -> Params:
        return strip_prefix(self.state_dict(), "f.")


class Personalizer(nn.Module):
    """FLowDUP's: psi are the parameters, and every batch makes a network of its own."""

    def __init__(self, work: Work, device: str) -> None:
        super().__init__()
        method: Any = work.build(device)
        config = method.config.hypernetwork
        self.read = work.inputs.reader()
        self.h1 = NETWORKS[work.model](work.shape, config.embedding)
        self.h2 = nn.ModuleDict(
            {
                "hidden": nn.Linear(config.embedding, config.hidden),
                "output": nn.Linear(config.hidden, work.k),
            }
        )
        self.psi_r = nn.Parameter(torch.zeros(work.k))
        f = NETWORKS[work.model](work.shape, work.classes).to(device)
        self.frame = (f,)  # a tuple keeps its parameters, which are never used, out of psi
        self.expand, self.weight = method.subspace, method.config.regularization
        self.load_state_dict(work.start(method))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        cut = (len(x) + 1) // 2
        r = self.h1(self.read(x[:cut])).mean(0)
        v = self.h2["output"](relu(self.h2["hidden"](layer_norm(r, r.shape))))
        logits = functional_call(self.frame[0], self.expand(v), (self.read(x[cut:]),))
        omega = (v - self.psi_r).square().sum()
        return cross_entropy(logits, y[cut:]) + self.weight * omega

    def psi(self) -> Params:
        return self.state_dict()


def program(entry: Entry) -> Program:
    work, device = entry.work, entry.device
    if device != "cpu":  # the fastest float32 that torch has, for everyone but flowdup's own engine
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    net = Classifier(work) if work.method == "fedavg" else Personalizer(work, device)
    return net.to(device)


def resident(entry: Entry) -> list[tuple[Tensor, Tensor]]:
    """All clients' points, on the device from the start."""
    clients = entry.work.population()
    return [(c.x.to(entry.device), c.y.to(entry.device)) for c in clients if c.y is not None]


def train(net: Program, x: Tensor, y: Tensor, work: Work) -> None:
    """One client's round."""
    sgd = torch.optim.SGD(net.parameters(), work.lr)
    for rows, labels in zip(x.split(work.batch), y.split(work.batch), strict=True):
        sgd.zero_grad()
        net.loss(rows, labels).backward()
        sgd.step()
