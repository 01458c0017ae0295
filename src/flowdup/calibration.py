"""What a prior-corrected method needs to know, fitted on clients whose labels are known.

Bias-corrected temperature scaling (Alexandari, Kundaje, Shrikumar, ICML 2020): `scale` and `bias`
minimise the negative log-likelihood of softmax(scale logits + bias) over all labeled points, so
that logits are right on average.  `sparsity` and `strength` of the prior, and `move`, how far
personal models go from everyone's, are then those of a grid with the best mean accuracy over
clients, and the least of them among equals.

Beware: the clients should have classes in the proportion that new clients will have, all together.
Points whose logits are NaN or infinite teach nothing, so that what is found is always finite.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from flowdup.params import Params
from flowdup.prior import log_prior

MOVES = (0.0, 0.5, 1.0)  # 1: personal models as the method makes them; 0: everyone's
STRENGTHS = (0.5, 1.0)  # beside 0, where the prior is not used
SPARSITIES = (0.0, 0.01, 0.03, 0.05, 0.08)
_RIDGE = 1e-3  # on the bias, for classes that no client has
_ITERATIONS = 50


class Calibration(NamedTuple):
    """A fitted correction of logits, and how accurate validation clients are with it."""

    correction: Params  # move [], scale [], bias [classes], sparsity [], strength []
    accuracies: Tensor  # of the clients with it, in percent [clients]
    predicted: Tensor  # how many labeled points are predicted to be of each class [classes]


def uncorrected(classes: int, move: float = 1.0) -> Params:
    """The correction that changes nothing but how far personal models are from everyone's."""
    one, none = torch.ones(()), torch.zeros(())
    return {
        "move": move * one,
        "scale": one,
        "bias": torch.zeros(classes),
        "sparsity": none,
        "strength": none,
    }


def calibrate(
    logits: Mapping[float, Sequence[Tensor]],
    labels: Sequence[Tensor],
    device: torch.device | str = "cpu",
) -> Calibration:
    """From uncorrected logits [n, classes] of clients with labels [n], -1 where there is none.

    By `move`, there may be several sets of logits to choose from, the first among equals.
    """
    found = [_calibrate(move, rows, labels, torch.device(device)) for move, rows in logits.items()]
    return max(found, key=lambda one: float(one.accuracies.mean()))


def _calibrate(
    move: float, logits: Sequence[Tensor], labels: Sequence[Tensor], device: torch.device
) -> Calibration:
    x = pad_sequence([rows.to(device, torch.float64) for rows in logits], batch_first=True)
    y = pad_sequence([own.to(device) for own in labels], batch_first=True, padding_value=-1)
    sizes = torch.tensor([len(own) for own in labels], device=device)
    present = (torch.arange(y.shape[1], device=device) < sizes[:, None]).to(x)  # [clients, n]
    known = y >= 0
    useful = known & x.isfinite().all(-1)
    scale, bias = fit_scale_and_bias(x[useful], y[useful])
    x = scale * x + bias
    settings = [(0.0, 0.0), *product(STRENGTHS, SPARSITIES)]
    shifts = [log_prior(x, present, sparsity, strength) for strength, sparsity in settings]
    answers = torch.stack([(x + shift[:, None]).argmax(-1) for shift in shifts])
    right = ((answers == y) & known).sum(2).double() / known.sum(1).clamp(min=1)
    accuracies = 100 * right[:, known.any(1)]  # [settings, clients]
    best = int(accuracies.mean(1).argmax())  # the first among equals
    correction = {
        "move": torch.tensor(move),
        "scale": scale,
        "bias": bias,
        "sparsity": torch.tensor(settings[best][1]),
        "strength": torch.tensor(settings[best][0]),
    }
    predicted = torch.bincount(answers[best][known], minlength=x.shape[-1])
    correction = {n: t.float().cpu() for n, t in correction.items()}
    return Calibration(correction, accuracies[best].cpu(), predicted.cpu())


def fit_scale_and_bias(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of finite logits [n, classes] with labels y [n]; 1 and 0 if there is none."""
    log_scale = logits.new_zeros(()).requires_grad_()
    bias = logits.new_zeros(logits.shape[1]).requires_grad_()
    if not len(y):
        return log_scale.exp().detach(), bias.detach()
    optimizer = torch.optim.LBFGS(
        [log_scale, bias], max_iter=_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(log_scale.exp() * logits + bias, y) + _RIDGE * bias.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return log_scale.exp().detach(), bias.detach()
