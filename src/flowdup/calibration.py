"""What a prior-corrected method needs to know, fitted on clients whose labels are known.

Bias-corrected temperature scaling (Alexandari, Kundaje, Shrikumar, ICML 2020): `scale` and `bias`
minimise the negative log-likelihood of softmax(scale logits + bias) over all labeled points, so
that logits are right on average.  `profile` are the clients' class shares, each client's from the
largest to the smallest, on average.  `sparsity`, `strength` and `typical` of the prior, and `move`,
how far personal models go from everyone's, are then those of a grid with the best mean accuracy
over clients, half of it on the points that class shares are found from and half on others: shares
that fit one half of a client's points to the letter rule out what is rare in the other.  Among
equals that is the least correction, and the `move` with the least loss.

What is asked of clients are sums and accuracies (`LabeledClients`), so that a fit is the same
whether they are here or on other machines.

Beware: the clients should have classes in the proportion that new clients will have, all together;
a class that none of them has keeps the place that the logits give it.
Points whose logits are NaN or infinite teach nothing, so that what is found is always finite.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from flowdup.params import Params
from flowdup.prior import as_typical, em, sparsity_for
from flowdup.random import Stream

MOVES = (0.0, 0.5, 1.0)  # 1: personal models as the method makes them; 0: everyone's
STRENGTHS = (0.5, 1.0)  # beside 0, where the prior is not used
SPARSITIES = (0.0, 0.01, 0.03, 0.05, 0.08)  # for up to ten classes
TYPICAL = (0.0, 0.5, 1.0)  # 1: shares are the profile's, in the order of those that EM finds
_RIDGE = 1e-3  # on the bias
_NO_SCALE = torch.tensor(-1e3, dtype=torch.float64)  # the logarithm of 0, nearly
_SCALE_VARIANCE = 1.0  # of the logarithm of the scale, a priori: where few points are all right, no
# scale would be large enough
_ITERATIONS = 50
_BYTES = 2**27  # of logits, of as many settings as a GPU tries at once; a CPU's caches hold one


def em_settings(classes: int) -> list[tuple[float, float]]:
    """Strength and sparsity, all that are tried."""
    sparsities = [sparsity_for(classes, each) for each in SPARSITIES]
    return [(0.0, 0.0), *product(STRENGTHS, sparsities)]


def prior_settings(classes: int) -> list[tuple[float, float, float]]:
    """Strength, sparsity and typical, all that are tried."""
    return [(*setting, typical) for setting, typical in product(em_settings(classes), TYPICAL)]


class Calibration(NamedTuple):
    """A fitted correction of logits, and how accurate validation clients are with it."""

    correction: Params  # bias and profile [classes], move, scale, sparsity, strength, typical []
    accuracies: Tensor  # of the clients with it, in percent [clients]
    predicted: Tensor  # how many labeled points are predicted to be of each class [classes]
    loss: float  # mean negative log-likelihood of their points at this scale and bias


def uncorrected(classes: int, move: float = 1.0) -> Params:
    """The correction that changes nothing but how far personal models are from everyone's."""
    one, none = torch.ones(()), torch.zeros(())
    return {
        "move": move * one,
        "scale": one,
        "bias": torch.zeros(classes),
        "sparsity": none,
        "strength": none,
        "typical": none,
        "profile": torch.full((classes,), 1 / classes),
    }


class Likelihood(NamedTuple):
    """Of points with labels and finite logits: sums at one scale and bias."""

    points: int
    loss: Tensor  # the negative log-likelihood []
    gradient: Tensor  # its, by the logarithm of the scale and by the bias [1 + classes]

    @property
    def mean(self) -> float:
        """The loss of a point; infinite where there are none, or where it is no number."""
        mean = float(self.loss) / self.points if self.points else math.inf
        return mean if math.isfinite(mean) else math.inf


class Shares(NamedTuple):
    """Of clients with labels: class shares of each, the largest first, summed."""

    clients: int
    total: Tensor  # [classes]

    @property
    def mean(self) -> Tensor:
        """Equal shares where there are no clients."""
        classes = len(self.total)
        return self.total / self.clients if self.clients else torch.full((classes,), 1 / classes)


class Grid(NamedTuple):
    """How clients fare with each setting of the prior, at one scale and bias."""

    accuracies: Tensor  # in percent [settings, clients]
    unseen: Tensor  # the same, each half of the points with class shares from the other
    predicted: Tensor  # labeled points by predicted class [settings, classes]


class LabeledClients(Protocol):
    """Clients that a correction is fitted on, wherever they are: they tell sums and accuracies."""

    moves: Sequence[float]  # to choose from
    classes: int

    def likelihood(self, move: float, log_scale: Tensor, bias: Tensor) -> Likelihood:
        """Over all of their labeled points."""

    def shares(self) -> Shares:
        """Of each client that has a labeled point."""

    def grid(self, move: float, scale: Tensor, bias: Tensor, profile: Tensor) -> Grid:
        """Over `prior_settings`, of each client that has a labeled point."""


class ClientsHere:
    """Clients whose logits and labels are in this process."""

    def __init__(
        self,
        logits: Mapping[float, Sequence[Tensor]],
        labels: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        self.moves: Sequence[float] = list(logits)
        self.logits, self.device = logits, device
        self.y = pad_sequence([own.to(device) for own in labels], True, -1)  # [clients, n]
        sizes = torch.tensor([len(own) for own in labels], device=device)
        self.present = torch.arange(self.y.shape[1], device=device) < sizes[:, None]
        self.halved = pad_sequence([_halved(len(own)) for own in labels], True).to(device)
        self.known = self.y >= 0
        self.classes = next(iter(logits.values()))[0].shape[-1]
        self._latest: dict[float, _Rows] = {}  # of one move alone, since they are large

    def likelihood(self, move: float, log_scale: Tensor, bias: Tensor) -> Likelihood:
        """Over all of their labeled points."""
        rows = self._rows(move)
        return likelihood(rows.useful, rows.labels, log_scale, bias)

    def shares(self) -> Shares:
        """Of each client that has a labeled point."""
        none = torch.zeros(len(self.y), self.classes, dtype=torch.float64, device=self.device)
        counts = none.scatter_add(1, self.y.clamp(min=0), self.known.double())[self.known.any(1)]
        shares = (counts / counts.sum(1, keepdim=True)).sort(dim=1, descending=True).values
        return Shares(len(shares), shares.sum(0).cpu())

    def grid(self, move: float, scale: Tensor, bias: Tensor, profile: Tensor) -> Grid:
        """Over `prior_settings`, of each client that has a labeled point."""
        plain = self._rows(move).x
        x, profile = scale.to(plain) * plain + bias.to(plain), profile.to(plain)
        settings = torch.tensor(em_settings(self.classes), dtype=x.dtype, device=x.device)
        each = len(TYPICAL) * x.nbytes
        at_once = 1 if x.device.type == "cpu" else max(1, _BYTES // max(1, each))

        def answers(present: Tensor) -> Tensor:
            parts = torch.split(settings, at_once)
            return torch.cat([answer(x, present.to(x), some, profile) for some in parts])

        found = answers(self.present)
        by_one, by_other = (answers(self.present & half) for half in (self.halved, ~self.halved))
        unseen = torch.where(self.halved, by_other, by_one)
        predicted = [torch.bincount(own[self.known], minlength=self.classes) for own in found]
        return Grid(self._right(found), self._right(unseen), torch.stack(predicted).cpu())

    def _right(self, answers: Tensor) -> Tensor:
        """In percent, of clients that have labels."""  # [settings, clients]
        points = self.known.sum(1).clamp(min=1)
        right = ((answers == self.y) & self.known).sum(2).double() / points
        return 100 * right[:, self.known.any(1)].cpu()

    def _rows(self, move: float) -> "_Rows":
        if move not in self._latest:
            rows = [own.to(self.device, torch.float64) for own in self.logits[move]]
            x = pad_sequence(rows, batch_first=True)
            useful = self.known & x.isfinite().all(-1)
            self._latest = {move: _Rows(x, x[useful].cpu(), self.y[useful].cpu())}
        return self._latest[move]


class _Rows(NamedTuple):
    x: Tensor  # logits [clients, n, classes]
    useful: Tensor  # those of labeled points that are finite [points, classes], on the CPU
    labels: Tensor  # of these [points], likewise


def _halved(points: int) -> Tensor:
    """Which points are in a random half, the smaller one."""  # [points], bool
    return torch.from_numpy(Stream(0).child("halved").permutation(points)) < points // 2


def answer(logits: Tensor, present: Tensor, settings: Tensor, profile: Tensor) -> Tensor:
    """Classes [settings * len(TYPICAL), clients, n] of logits [clients, n, classes]: with
    the prior of each setting [settings, 2], strength and sparsity, and each of TYPICAL.
    """
    strength, sparsity = settings.T[..., None, None]
    every = logits.expand(len(settings), *logits.shape)
    shift, mean = em(every, present, sparsity, strength)
    shifts = [as_typical(shift, mean, strength, typical, profile) for typical in TYPICAL]
    return (logits + torch.stack(shifts, 1)[..., None, :]).argmax(-1).flatten(0, 1)


def calibrate(
    logits: Mapping[float, Sequence[Tensor]],
    labels: Sequence[Tensor],
    device: torch.device | str = "cpu",
) -> Calibration:
    """From uncorrected logits [n, classes] of clients with labels [n], -1 where there is none.

    By `move`, there may be several sets of logits to choose from.
    """
    return fit_correction(ClientsHere(logits, labels, torch.device(device)))


def fit_correction(clients: LabeledClients) -> Calibration:
    """The best correction for these clients, of which sums and accuracies are all that is asked."""
    found: list[tuple[float, Calibration]] = []
    profile = clients.shares().mean
    for move in clients.moves:
        ask = partial(clients.likelihood, move)
        scale, bias = fit_by_sums(ask, clients.classes)
        accuracies, unseen, predicted = clients.grid(move, scale, bias, profile)
        means = (accuracies + unseen).mean(1) / 2
        best = int(means.argmax())  # the first among equals
        strength, sparsity, typical = prior_settings(clients.classes)[best]
        correction = {
            "move": torch.tensor(move),
            "scale": scale,
            "bias": bias,
            "sparsity": torch.tensor(sparsity),
            "strength": torch.tensor(strength),
            "typical": torch.tensor(typical),
            "profile": profile,
        }
        correction = {n: t.float() for n, t in correction.items()}
        loss = ask(scale.log(), bias).mean
        one = Calibration(correction, accuracies[best], predicted[best], loss)
        found.append((float(means[best]), one))
    return max(found, key=lambda pair: (pair[0], -pair[1].loss))[1]


def likelihood(logits: Tensor, y: Tensor, log_scale: Tensor, bias: Tensor) -> Likelihood:
    """Of finite logits [n, classes] with labels y [n]."""
    with torch.enable_grad():
        at = [t.detach().to(logits).requires_grad_() for t in (log_scale, bias)]
        loss = cross_entropy(at[0].exp() * logits + at[1], y, reduction="sum")
        gradients = torch.autograd.grad(loss, at)
    gradient = torch.cat([g.reshape(-1) for g in gradients])
    return Likelihood(len(y), loss.detach().cpu(), gradient.cpu())


def fit_scale_and_bias(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of finite logits [n, classes] with labels y [n]; 1 and 0 if there is none."""
    return fit_by_sums(partial(likelihood, logits, y), logits.shape[1])


def fit_by_sums(ask: Callable[[Tensor, Tensor], Likelihood], classes: int) -> tuple[Tensor, Tensor]:
    """The scale and bias with the least mean of what is asked; 1 and 0 if there are no points, or
    if what is told leads to numbers that are not finite: these are not asked about.

    Of a class that no point has nothing is known: it gets the mean bias of the others.
    """
    log_scale = torch.zeros((), dtype=torch.float64).requires_grad_()
    bias = torch.zeros(classes, dtype=torch.float64).requires_grad_()
    # at scale 0 every class is as likely, so that the gradient tells how many points have it
    points, _, gradient = ask(_NO_SCALE, bias.detach())
    if not points:
        return _plain(classes)
    unseen = points / classes - gradient[1:] < 0.5
    seen = (~unseen).double()
    optimizer = torch.optim.LBFGS(
        [log_scale, bias], max_iter=_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def whole() -> Tensor:
        return torch.where(unseen, (bias.detach() * seen).sum() / seen.sum(), bias.detach())

    def closure() -> Tensor:
        if not _is_finite(log_scale, bias):
            raise _NotFinite
        own = whole()
        points, loss, gradient = ask(log_scale.detach(), own)
        known = log_scale.detach() / _SCALE_VARIANCE
        by_own = gradient[1:] / points + 2 * _RIDGE * own
        log_scale.grad = (gradient[0] + known) / points
        bias.grad = seen * (by_own + by_own[unseen].sum() / seen.sum())
        prior = log_scale.detach() * known / 2 / points + _RIDGE * own.square().sum()
        return loss / points + prior

    try:
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    except _NotFinite:
        return _plain(classes)
    if not _is_finite(log_scale, bias):
        return _plain(classes)
    return log_scale.exp().detach(), whole()


class _NotFinite(Exception):
    """A fit has gone to where no numbers are."""


def _plain(classes: int) -> tuple[Tensor, Tensor]:
    """The scale and bias that change nothing."""
    return torch.ones((), dtype=torch.float64), torch.zeros(classes, dtype=torch.float64)


def _is_finite(log_scale: Tensor, bias: Tensor) -> bool:
    """Also as the floats of a correction."""
    return bool(torch.cat([log_scale.exp().reshape(1), bias]).float().isfinite().all())
