"""The correction for class shares, fitted on validation clients of all nodes (`calibration.py`).

Logits and labels stay at nodes.  They tell class shares summed over their clients, each client's
from the largest to the smallest; sums over their labeled points (the likelihood and its gradient,
`1 + classes` numbers) at each scale and bias that the fit asks for; and then two accuracies of each
client with each setting of the prior.  Beware: from such sums a coordinator can learn how many
labeled points of each class a node's validation clients have.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowdup.calibration import (
    MOVES,
    Calibration,
    ClientsHere,
    Grid,
    Likelihood,
    Shares,
    fit_correction,
    prior_settings,
)
from flowdup.errors import MessageError
from flowdup.federation.calls import Calls

_ROUNDING = 1e-6
_NOT_BEGUN = "the coordinator asks for a fit that has not begun: drop it"
Refuse = Callable[[str, str], None]  # a node, and why


class NodeFitting:
    """A node's side; `as_one`: its clients are not told apart."""

    def __init__(self, clients: ClientsHere | None, as_one: bool) -> None:
        self.clients, self.as_one = clients, as_one

    def likelihood(self, move: float, parameters: list[float]) -> dict[str, Any]:
        """As plain numbers."""
        found = self._here(move).likelihood(move, *_tensors(parameters))
        loss, gradient = float(found.loss), found.gradient.tolist()
        return {"points": found.points, "loss": loss, "gradient": gradient}

    def shares(self) -> dict[str, Any]:
        """As plain numbers."""
        found = self._fit().shares()
        if self.as_one:
            found = Shares(1, found.mean)
        return {"clients": found.clients, "total": found.total.tolist()}

    def grid(self, move: float, parameters: list[float], profile: list[float]) -> dict[str, Any]:
        """As plain numbers."""
        log_scale, bias = _tensors(parameters)
        usual = torch.tensor(profile, dtype=torch.float64)
        found = self._here(move).grid(move, log_scale.exp(), bias, usual)
        told = {"accuracies": found.accuracies, "unseen": found.unseen}
        if self.as_one:
            told = {name: of_clients.mean(1, True) for name, of_clients in told.items()}
        numbers = told | {"predicted": found.predicted}
        return {name: tensor.tolist() for name, tensor in numbers.items()}

    def _here(self, move: float) -> ClientsHere:
        if move not in self._fit().moves:
            raise MessageError(_NOT_BEGUN)
        return self._fit()

    def _fit(self) -> ClientsHere:
        if self.clients is None:
            raise MessageError(_NOT_BEGUN)
        return self.clients


class NodeLeftError(Exception):
    """A node does not answer any more: what the others tell is no sum over the same points."""


@dataclass
class NodesFitting:
    """The coordinator's side: clients of some nodes, as a fit sees them (`LabeledClients`)."""

    calls: Calls
    nodes: list[str]
    moves: Sequence[float]
    classes: int
    refuse: Refuse

    def likelihood(self, move: float, log_scale: Tensor, bias: Tensor) -> Likelihood:
        """Summed over nodes."""
        words = move, [float(log_scale), *bias.tolist()]
        told = self._ask("likelihood", words, self._read_likelihood)
        points, losses, gradients = zip(*told, strict=True)
        return Likelihood(sum(points), torch.stack(losses).sum(), torch.stack(gradients).sum(0))

    def shares(self) -> Shares:
        """Summed over nodes."""
        clients, totals = zip(*self._ask("shares", (), self._read_shares), strict=True)
        return Shares(sum(clients), torch.stack(totals).sum(0))

    def grid(self, move: float, scale: Tensor, bias: Tensor, profile: Tensor) -> Grid:
        """All nodes' clients side by side."""
        words = move, [float(scale.log()), *bias.tolist()], profile.tolist()
        told = self._ask("grid", words, self._read_grid)
        accuracies, unseen, predicted = zip(*told, strict=True)
        return Grid(torch.cat(accuracies, 1), torch.cat(unseen, 1), torch.stack(predicted).sum(0))

    def _ask(self, name: str, words: tuple[Any, ...], read: Callable[[Any], Any]) -> list[Any]:
        answers, found = self.calls.call(name, {node: words for node in self.nodes}), {}
        for node, answer in answers.items():
            if isinstance(answer, dict) and "error" in answer:
                continue  # its own trouble, and no offence
            try:
                found[node] = read(answer)
            except (ValueError, TypeError, KeyError, RuntimeError, OverflowError):
                self.refuse(node, "what it tells for the correction cannot be: drop it")
        if len(found) < len(self.nodes):
            self.nodes = [*found]
            raise NodeLeftError
        return [found[node] for node in self.nodes]

    def _read_shares(self, answer: Any) -> Shares:
        clients, total = answer["clients"], torch.tensor(answer["total"], dtype=torch.float64)
        if type(clients) is not int or not 0 <= clients < 2**31 or total.shape != (self.classes,):
            raise ValueError
        if bool((total < 0).any()) or bool((total.diff() > _ROUNDING * clients).any()):
            raise ValueError
        if not abs(float(total.sum()) - clients) <= _ROUNDING * clients:  # NaN is not
            raise ValueError
        return Shares(clients, total)

    def _read_likelihood(self, answer: Any) -> Likelihood:
        points, gradient = answer["points"], torch.tensor(answer["gradient"], dtype=torch.float64)
        loss = torch.tensor(answer["loss"], dtype=torch.float64)
        if type(points) is not int or not 0 <= points < 2**31 or loss.ndim or loss < 0:
            raise ValueError
        if gradient.shape != (1 + self.classes,) or not bool(gradient.isfinite().all()):
            raise ValueError
        if not math.isfinite(float(loss)) or (not points and float(loss)):
            raise ValueError
        # by a class's bias, a point has its share of the class, less 1 if it is of the class
        if float(gradient[1:].abs().max()) > points * (1 + _ROUNDING):
            raise ValueError
        return Likelihood(points, loss, gradient)

    def _read_grid(self, answer: Any) -> Grid:
        names = "accuracies", "unseen"
        accuracies, unseen = (torch.tensor(answer[n], dtype=torch.float64) for n in names)
        predicted = torch.tensor(answer["predicted"])
        settings = len(prior_settings(self.classes))
        shapes = predicted.shape == (settings, self.classes) and accuracies.ndim == 2
        if not shapes or len(accuracies) != settings or predicted.is_floating_point():
            raise ValueError
        if unseen.shape != accuracies.shape or bool((predicted < 0).any()):
            raise ValueError
        if not all(bool(((told >= 0) & (told <= 100)).all()) for told in (accuracies, unseen)):
            raise ValueError
        return Grid(accuracies, unseen, predicted)


def fit_at_nodes(
    calls: Calls, task: bytes, classes: int, interpolates: bool, refuse: Refuse
) -> Calibration | None:
    """The correction by all nodes that have labeled validation clients; None if there is none.

    If a node leaves, the fit begins again with the others.
    """
    answers = calls.call("calibrate", {node: (task,) for node in calls.alive})
    nodes = [n for n, told in answers.items() if isinstance(told, dict) and told.get("labeled")]
    clients = NodesFitting(calls, nodes, MOVES if interpolates else (1.0,), classes, refuse)
    while clients.nodes:
        try:
            return fit_correction(clients)
        except NodeLeftError:
            continue
    return None


def _tensors(parameters: list[float]) -> tuple[Tensor, Tensor]:
    found = torch.tensor(parameters, dtype=torch.float64)
    return found[0], found[1:]
