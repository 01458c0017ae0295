"""Models as users bring them, which `vmap`, tracing or plain averaging do not take as they are."""

import torch
from torch import Tensor, nn

import flowdup


class Recurrent(nn.Module):
    """A GRU over the rows of an image."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.cell = nn.GRU(shape[-1], 8, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.cell(x.flatten(1, -2))[0]
        return self.head(states[:, -1])


class Branching(nn.Module):
    """Another layer where a number in the data says so."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(torch.Size(shape).numel(), 8)
        self.second = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        return self.second(x.relu() if x.mean() > 0 else x.tanh())


class FunctionalDropout(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.dropout(self.first(x.flatten(1))))  # on in any mode


def pretrained(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A backbone with BatchNorm whose weights and statistics are always the same, in eval mode."""
    draw = torch.Generator().manual_seed(1)
    backbone = nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    state = backbone.state_dict()
    values = {n: torch.rand(t.shape, generator=draw) + 0.5 for n, t in state.items()}
    backbone.load_state_dict(values)
    side = shape[-1] - 2
    return nn.Sequential(backbone.eval(), nn.Flatten(), nn.Linear(4 * side * side, outputs))


def dropping(shape: tuple[int, ...], outputs: int) -> nn.Module:
    hidden = nn.Linear(torch.Size(shape).numel(), 16)
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, outputs))


for name, factory in {
    "user-gru": Recurrent,
    "user-branch": Branching,
    "user-pretrained": pretrained,
    "user-dropout": dropping,
    "user-functional-dropout": FunctionalDropout,
}.items():
    flowdup.register_model(name, factory)
