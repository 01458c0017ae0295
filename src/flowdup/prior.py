"""How often each class occurs among a client's points, estimated from logits without a label.

EM (Saerens, Latinne, Decaestecker, "Adjusting the Outputs of a Classifier to New a Priori
Probabilities: A Simple Procedure", Neural Computation 2002), where logits are those of a classifier
whose classes are equally frequent:

    w(y | x) proportional to exp(logit_y(x)) q(y)                                       E-step
    q(y)     proportional to max(mean over x in X of w(y | x) - sparsity, 0)            M-step

With a strength below 1, q(y)^strength stands in the E-step.  A sparsity above 0 is the mode under a
Dirichlet prior that favours few classes: what every class collects from points of others is taken
off it.  Where clients are alike in how uneven their shares are, a `profile` says so: a typical
client's shares, the largest first.  The mean of w then says which class is which, and log q moves
to the profile's, by `typical`.  It needs calibrated logits (`calibration.py`): where one class's
are too high by a constant, EM gives everything to that class.
"""

import torch
from torch import Tensor

STEPS = 20
_LEAST = 1e-6  # the share that a class keeps, so that logarithms are finite


def log_prior(
    logits: Tensor,
    present: Tensor,
    sparsity: Tensor | float = 0.0,
    strength: Tensor | float = 1.0,
    typical: Tensor | float = 0.0,
    profile: Tensor | None = None,
) -> Tensor:
    """strength log q, from logits [..., n, classes] of the present [..., n] points.

    Its shape is [..., classes].
    """
    shift, mean = em(logits, present, sparsity, strength)
    return shift if profile is None else as_typical(shift, mean, strength, typical, profile)


def em(
    logits: Tensor, present: Tensor, sparsity: Tensor | float, strength: Tensor | float
) -> tuple[Tensor, Tensor]:
    """strength log q and the mean of w, both [..., classes], after the last step."""
    count = present.sum(-1, keepdim=True).clamp(min=1)
    shift = torch.zeros_like(logits[..., 0, :])
    for _ in range(STEPS):
        w = (logits + shift[..., None, :]).softmax(-1)  # [..., n, classes]
        mean = (present[..., None, :] @ w)[..., 0, :] / count
        q = (mean - sparsity).clamp(min=_LEAST)
        shift = strength * (q / q.sum(-1, keepdim=True)).log()
    return shift, mean


def as_typical(
    shift: Tensor,
    mean: Tensor,
    strength: Tensor | float,
    typical: Tensor | float,
    profile: Tensor,
) -> Tensor:
    """strength log q [..., classes], moved to the profile's [classes] in the order of the mean."""
    rank = mean.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    usual = strength * profile.clamp(min=_LEAST).log()[rank]
    return shift + typical * (usual - shift)


def sparsity_for(classes: int, of_ten: float) -> float:
    """What a sparsity for up to ten classes becomes with more: their shares are smaller."""
    return of_ten * min(1.0, 10 / classes)
