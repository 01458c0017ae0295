"""Where a run may begin: at the model that another run has learned for everyone, at a model file,
or at another run's psi.
"""

from dataclasses import fields
from pathlib import Path

from flowdup.checkpoint import checkpoint_in, load_checkpoint
from flowdup.data import InputSpec
from flowdup.errors import ConfigError
from flowdup.federation_spec import FederationSpec
from flowdup.methods import Params
from flowdup.models import Weights
from flowdup.personalize import load, load_model


def load_start(path: Path, model: str, inputs: InputSpec) -> Weights:
    """The weights in a run folder or in a file that `PersonalModel.save` wrote.

    ConfigError if there is nothing, or they are of another model or for other inputs than those
    given.
    """
    if not path.exists():
        raise ConfigError(
            f"`start` names {path}, which does not exist: give a run folder or a model file"
        )
    if path.is_dir():
        federation = load(path)
        name, theirs = federation.spec.model, federation.spec.inputs
        weights = federation.method.global_model(federation.psi)
    else:
        saved = load_model(path)
        name, theirs = saved.name, saved.inputs
        weights = {n: p.detach() for n, p in saved.module.named_parameters()}
    _refuse_difference(path, "model", name, model)
    theirs, inputs = theirs.with_names(inputs), inputs.with_names(theirs)  # not everyone has them
    for field in fields(InputSpec):
        _refuse_difference(path, field.name, *(getattr(s, field.name) for s in (theirs, inputs)))
    return {n: w.float().cpu().clone() for n, w in weights.items()}


def load_prior(path: Path, federation: FederationSpec) -> Params:
    """psi of a run of the same federation, in the order of `init`: the deployed one.

    ConfigError if its seed, model or method is another: psi would mean something else.
    """
    spec, state = load_checkpoint(checkpoint_in(path))
    if state.stage or state.start or not federation.is_same(spec):
        raise ConfigError(
            f"a run cannot begin from psi of {path}, which is of another federation: give a run "
            "with the same seed, model and method, without `start` and stages"
        )
    return {n: (state.average or state.psi)[n] for n in federation.psi_names}


def _refuse_difference(path: Path, what: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise ConfigError(
            f"a run cannot start from {path}: its {what} is {theirs} there and {ours} here; give "
            "a start that fits, or none"
        )
