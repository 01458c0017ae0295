"""What a prior-corrected method needs to know, fitted on clients whose labels are known.

Bias-corrected temperature scaling (Alexandari, Kundaje, Shrikumar, ICML 2020): `scale` and `bias`
minimise the negative log-likelihood of softmax(scale logits + bias) over all labeled points, so
that logits are right on average.  `sparsity` and `strength` of the prior are then those of a grid
with the best mean accuracy over clients, and with the least correction among equals.

Beware: the clients should have classes in the proportion that new clients will have, all together.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from flowdup.params import Params
from flowdup.prior import log_prior

STRENGTHS = (0.0, 0.5, 1.0)  # 0: calibrated alone
SPARSITIES = (0.0, 0.01, 0.03, 0.05, 0.08)
_RIDGE = 1e-3  # on the bias, for classes that no client has
_ITERATIONS = 50


class Calibration(NamedTuple):
    correction: Params  # scale [], bias [classes], sparsity [], strength []
    accuracies: Tensor  # of the clients with it, in percent [clients]


def uncorrected(classes: int) -> Params:
    """The correction that changes nothing."""
    one, none = torch.ones(()), torch.zeros(())
    return {"scale": one, "bias": torch.zeros(classes), "sparsity": none, "strength": none}


def calibrate(
    logits: Sequence[Tensor], labels: Sequence[Tensor], device: torch.device | str = "cpu"
) -> Calibration:
    """From uncorrected logits [n, classes] of clients with labels [n], -1 where there is none."""
    x = pad_sequence([rows.to(device, torch.float64) for rows in logits], batch_first=True)
    y = pad_sequence([own.to(device) for own in labels], batch_first=True, padding_value=-1)
    sizes = torch.tensor([len(own) for own in labels], device=device)
    present = (torch.arange(y.shape[1], device=device) < sizes[:, None]).to(x)  # [clients, n]
    known = y >= 0
    scale, bias = fit_scale_and_bias(x[known], y[known])
    x = scale * x + bias
    best: tuple[float, float, float, Tensor] | None = None
    for strength, sparsity in product(STRENGTHS, SPARSITIES):
        if strength == 0 and sparsity:
            continue
        shift = log_prior(x, present, sparsity, strength) if strength else x.new_zeros(x.shape[-1])
        answer = (x + shift.unsqueeze(-2)).argmax(-1)
        right = ((answer == y) & known).sum(1) / known.sum(1).clamp(min=1)
        accuracies = 100 * right[known.any(1)]
        mean = float(accuracies.mean())
        if best is None or mean > best[0]:
            best = mean, strength, sparsity, accuracies
    assert best is not None
    _, strength, sparsity, accuracies = best
    correction = {
        "scale": scale,
        "bias": bias,
        "sparsity": torch.tensor(sparsity),
        "strength": torch.tensor(strength),
    }
    return Calibration({n: t.float().cpu() for n, t in correction.items()}, accuracies.cpu())


def fit_scale_and_bias(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits [n, classes] with labels y [n]."""
    log_scale = logits.new_zeros(()).requires_grad_()
    bias = logits.new_zeros(logits.shape[1]).requires_grad_()
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
