"""A method's personal model, corrected for how often each class occurs at the client.

Any method can wear it (`method.correction = "em"`): training and what is sent stay the method's.
On a client's unlabeled data X, with the method's own model theta,

    theta    <- theta* + move (theta - theta*)     where there is a model theta* for everyone
    logits(x) = scale f(x; theta) + bias          calibrated, as if classes were equally frequent
    q         = how often each class occurs in X  EM on these logits, moved by `typical` to the
                                                  shares of a typical client (`prior.py`)
    theta'    = theta, its last layer so that f(x; theta') = logits(x) + strength log q

move, scale, bias, sparsity, strength, typical and these shares, the profile, are fitted on labeled
validation clients (`calibration.py`) and stand beside psi as `correction.scale` and so on, a few
numbers.  Where there are no such clients, EM has the method's own logits and its prior counts in
full.

Alexandari, Kundaje, Shrikumar, "Maximum Likelihood with Bias-Corrected Calibration is Hard-To-Beat
at Label Shift Adaptation", ICML 2020, is EM on such logits; the sparse prior is an addition.
"""

import torch
from torch import Tensor

from flowdup.errors import ConfigError
from flowdup.methods.base import Batch, Deployed, Method
from flowdup.methods.context import MethodContext
from flowdup.methods.features import FeatureModel
from flowdup.models.network import Weights
from flowdup.params import Params, strip_prefix
from flowdup.prior import log_prior
from flowdup.random import Stream

PREFIX = "correction."
_CHUNK = 2048  # points that pass through f at once


class Corrected(Method):
    """`method`, whose personal models know how often each class occurs."""

    def __init__(self, method: Method, context: MethodContext) -> None:
        self.method, self.f = method, method.f
        self.learns_unlabeled, self.fingerprint = method.learns_unlabeled, method.fingerprint
        self.k, self.batch_size = method.k, method.batch_size
        self.has_embedding, self.broadcast = method.has_embedding, method.broadcast
        self.interpolates, self.relabels = method.interpolates, method.relabels
        self.rank_one, self.lr_scales = method.rank_one, method.lr_scales
        if method.predicts_jointly:
            raise ConfigError(
                "method.correction is for methods that make models, and this one corrects "
                "predictions itself: choose method.correction = 'none'"
            )
        last = FeatureModel.of(method.f, context)
        self.weight, self.bias = last.weight, last.bias
        self.is_corrected = True

    def init(self, stream: Stream) -> Params:
        return self.method.init(stream)

    def loss(self, params: Params, batch: Batch, start: Params) -> Tensor:
        return self.method.loss(params, batch, start)

    def personalize(self, params: Params, x: Tensor, present: Tensor) -> Weights:
        theta = self.method.personalize(_own(params), x, present)
        if self.interpolates and f"{PREFIX}move" in params:
            move, for_all = params[f"{PREFIX}move"], self.method.global_model(_own(params))
            theta = {n: for_all[n] + move * (w - for_all[n]) for n, w in theta.items()}
        theta = self._calibrated(theta, params)
        logits = torch.cat([self.f(theta, rows) for rows in torch.split(x, _CHUNK)])
        found = strip_prefix(params, PREFIX)
        prior = found.get("sparsity", 0.0), found.get("strength", 1.0), found.get("typical", 0.0)
        shift = log_prior(logits, present, *prior, found.get("profile"))
        return theta | {self.bias: theta[self.bias] + shift}

    def global_model(self, params: Params) -> Weights:
        """The method's, calibrated."""
        return self._calibrated(self.method.global_model(_own(params)), params)

    def labels(self, start: Params, x: Tensor, y: Tensor, present: Tensor) -> Tensor:
        return self.method.labels(start, x, y, present)

    def embedding(self, params: Params, x: Tensor, present: Tensor) -> Tensor:
        return self.method.embedding(_own(params), x, present)

    def server_state(self) -> Params:
        return self.method.server_state()

    def update_server_state(self, state: Params, loss: Tensor, deployed: Deployed) -> Params:
        return self.method.update_server_state(state, loss, deployed)

    def _calibrated(self, theta: Weights, params: Params) -> Weights:
        if f"{PREFIX}scale" not in params:
            return theta
        scale, bias = params[f"{PREFIX}scale"], params[f"{PREFIX}bias"]
        return theta | {
            self.weight: scale * theta[self.weight],
            self.bias: scale * theta[self.bias] + bias,
        }


def _own(params: Params) -> Params:
    """psi without the correction's numbers: a method may take all of it for its model."""
    return {n: p for n, p in params.items() if not n.startswith(PREFIX)}
