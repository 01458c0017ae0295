"""From unlabeled data to a classifier: no label, and with FLowDUP one forward pass, no gradient."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowdup.accelerate.functions import fast_function
from flowdup.certificate.own_thresholds import own_sets
from flowdup.certificate.prediction_sets import SetThresholds
from flowdup.certificate.stored import certified_levels
from flowdup.checkpoint import checkpoint_in, load_checkpoint
from flowdup.devices import parse_device
from flowdup.errors import CheckpointError, ConfigError, DataError, FlowdupError
from flowdup.familiarity import Familiarity, Verdict, stored_familiarity
from flowdup.federation_spec import FederationSpec
from flowdup.methods import METHODS, Method, MethodConfig, MethodContext, Params
from flowdup.models import Weights
from flowdup.personal_model import (
    Inputs,
    PersonalModel,
    checked_inputs,
    load_model,
    too_large,
    weights_digest,
)
from flowdup.random import Stream
from flowdup.stored_tensors import all_finite

__all__ = ["Federation", "Inputs", "PersonalModel", "load", "load_model", "psi_digest"]

_MOST_UNNAMED = 2**22  # weights of a network that a method has beside psi and theta


class Federation:
    """What training leaves behind: psi, and all it takes to make any client's model."""

    def __init__(
        self,
        spec: FederationSpec,
        method: Method,
        psi: Params,
        round: int,
        start: Weights | None = None,  # that its last stage began from
        levels: SetThresholds | None = None,  # of prediction sets, if it is certified
        summary: Familiarity | None = None,  # of training clients, to tell foreign ones by
    ) -> None:
        self.spec, self.method, self.psi, self.round = spec, method, psi, round
        self.start, self.levels, self.summary = start or {}, levels, summary
        self.device = next(iter(psi.values())).device

    @torch.no_grad()
    def personalize(self, x: Inputs) -> PersonalModel:
        """The client's own model from its unlabeled inputs x [n, *shape], n at least 1."""
        self._check_makes_models()
        x = self._read(x)
        weights = self.method.personalize(self.psi, x, _present(x))
        if not all_finite(weights):
            raise too_large("a model")
        model = PersonalModel(self._model, self.spec.inputs, weights)
        if self.levels:
            model.sets = own_sets(self.levels, model.exact_probabilities(x).numpy())
        return model

    @torch.no_grad()
    def global_model(self) -> PersonalModel:
        """The one model for everyone: what a foreign client is better off with.

        FlowdupError if the method has none.
        """
        try:
            weights = self.method.global_model(self.psi)
        except FlowdupError:
            raise FlowdupError(
                f"method '{self.spec.method['name']}' learns no model for everyone: take the "
                "client's own, or train flowdup or flowdup-plus"
            ) from None
        return PersonalModel(self._model, self.spec.inputs, weights, is_global=True)

    def familiarity(self, x: Inputs) -> Verdict:
        """Whether inputs x [n, *shape] look like those of training clients (`familiarity.py`).

        FlowdupError if the federation has nothing to tell by.  Beware: a shift of labels given
        inputs is not seen.
        """
        r = self.embedding(x)
        if self.summary is None:
            raise FlowdupError(
                "nothing is stored of this federation to tell foreign clients by: finish its run "
                "by `flowdup train --resume`, with enough validation clients for "
                "run.false_alarms (19 at 0.05)"
            )
        return self.summary.judge(r, len(x))

    def personalizer(self, x: Inputs) -> Callable[[Inputs], Weights]:
        """For many clients with inputs shaped like x: a function from theirs to their models'
        weights, traced once and free of Python's work between operations; on a GPU a copy, one
        launch and a copy.

        Beware: it never waits for the GPU, so it does not see whether weights are finite, which
        `personalize` does.
        """
        self._check_makes_models()
        x = self._read(x).contiguous()
        shape, present = x.shape, _present(x)

        def personalize(x: Tensor) -> Weights:
            weights = self.method.personalize(self.psi, x, present)
            return {n: w.clone() for n, w in weights.items()}  # some methods give psi itself

        program = fast_function(personalize, x)

        def weights(x: Inputs) -> Weights:
            x = self._read(x)
            if x.shape != shape:
                raise DataError(
                    f"this personalizer is for inputs {list(shape)}, not {list(x.shape)}: "
                    "make another"
                )
            found: Weights = program(x.contiguous())
            return found

        return weights

    @torch.no_grad()
    def embedding(self, x: Inputs) -> Tensor:
        """r(X), what the hypernetwork knows of the client."""  # [embedding]
        if not self.method.has_embedding:
            name = self.spec.method["name"]
            able = [n for n, entry in METHODS.items() if entry.method.has_embedding]
            raise FlowdupError(
                f"method '{name}' has no embedding of clients: train {' or '.join(able)}"
            )
        x = self._read(x)
        return self.method.embedding(self.psi, x, _present(x))

    def __reduce__(self) -> tuple[Any, ...]:
        """For a spawned worker: psi is sent, and the method made anew from its description."""
        psi = {n: p.cpu() for n, p in self.psi.items()}
        where = str(self.device)
        return _make_federation, (
            self.spec,
            psi,
            self.round,
            self.start,
            where,
            self.levels,
            self.summary,
        )

    def _check_makes_models(self) -> None:
        if self.method.predicts_jointly:
            name = self.spec.method["name"]
            raise FlowdupError(
                f"method '{name}' corrects predictions of a client's points together and makes no "
                "model of the client's own: score it by `flowdup evaluate`, or train another method"
            )

    @property
    def _model(self) -> str:
        return self.method.f.name or self.spec.model

    def _read(self, x: Inputs) -> Tensor:
        return checked_inputs(self.spec.inputs, x).to(self.device)


def load(folder: str | Path, device: torch.device | str = "cpu") -> Federation:
    """Open a run folder (or the checkpoint folder inside it) and check all that can be checked.

    Models will be made on the device and stay there; inputs may be anywhere.
    """
    device = parse_device(str(device))
    place = checkpoint_in(Path(folder))
    spec, state = load_checkpoint(place)
    method = _build_method(spec, state.start, device)
    spec.check(method)
    psi = {n: p.to(device, torch.float32) for n, p in state.deployed.items()}
    digest = psi_digest(state.deployed)
    levels = certified_levels(Path(folder), digest, is_checkpoint=place == Path(folder))
    summary = stored_familiarity(place, digest)
    return Federation(spec, method, psi, state.round, state.start, levels, summary)


def psi_digest(psi: Params) -> str:
    """SHA-256 of what a checkpoint deploys, by which what is stored beside it knows whose it is."""
    return weights_digest("", {n: p.cpu() for n, p in psi.items()})


def _make_federation(
    spec: FederationSpec,
    psi: Params,
    round: int,
    start: Weights,
    device: str,
    levels: SetThresholds | None,
    summary: Familiarity | None,
) -> Federation:
    place = torch.device(device)
    moved = {n: p.to(place) for n, p in psi.items()}
    method = _build_method(spec, start, place)
    return Federation(spec, method, moved, round, start, levels, summary)


def _build_method(spec: FederationSpec, start: Weights, device: torch.device) -> Method:
    """What a checkpoint describes, with no network larger than the shapes that it names."""
    sizes = {n: math.prod(shape) for n, shape in spec.shapes.items()}
    kinds = [sum(s for n, s in sizes.items() if n.startswith(k)) for k in ("psi/", "theta/")]
    try:
        context = MethodContext(
            spec.model,
            spec.inputs,
            Stream(spec.seed),
            device,
            most_weights=max(*kinds, _MOST_UNNAMED),
            start=start,
        )
        return MethodConfig.from_table(spec.method).build(context)
    except ConfigError as error:
        raise CheckpointError(
            f"the federation cannot be made as the checkpoint describes it ({error}): restore the "
            "folder from a copy, or import what its model needs"
        ) from None


def _present(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], device=x.device)
