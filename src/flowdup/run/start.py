"""Where a run may begin: at the model that another run has learned for everyone, at a model file,
or at another run's psi.
"""

from pathlib import Path

from flowdup.checkpoint import checkpoint_in, load_checkpoint
from flowdup.data import InputSpec
from flowdup.errors import ConfigError, FlowdupError
from flowdup.federation_spec import FederationSpec
from flowdup.methods import Params
from flowdup.models import Weights, build_network
from flowdup.personal_model import read_weights
from flowdup.personalize import load, load_model

_MUST_FIT = ("shape", "dtype", "classes")
_NAMES = ("class_names", "columns")


def load_start(path: Path, model: str, inputs: InputSpec) -> tuple[Weights, InputSpec]:
    """The weights in a run folder, in a file that `PersonalModel.save` wrote, or in any safetensors
    file with the model's own names; and the inputs, read with mean and std of the start, if it has
    them.

    ConfigError if there is nothing, or they are of another model or for other inputs than those
    given.
    """
    if not path.exists():
        raise ConfigError(
            f"`start` names {path}, which does not exist: give a run folder or a model file"
        )
    if path.is_file() and (weights := read_weights(path)) is not None:
        return _fitting(path, weights, model, inputs), inputs
    if path.is_dir():
        federation = load(path)
        name, theirs = federation.spec.model, federation.spec.inputs
        try:
            weights = federation.method.global_model(federation.psi)
        except FlowdupError as error:
            raise ConfigError(f"a run cannot start from {path}: {error}") from None
    else:
        saved = load_model(path)
        name, theirs = saved.name, saved.inputs
        weights = {n: p.detach() for n, p in saved.module.named_parameters()}
    _refuse_difference(path, "model", name, model)
    for key in _MUST_FIT:
        _refuse_difference(path, key, getattr(theirs, key), getattr(inputs, key))
    for key in _NAMES:
        names = getattr(theirs, key), getattr(inputs, key)
        if all(names):  # not everyone has them
            _refuse_difference(path, key, *names)
    return {n: w.float().cpu().clone() for n, w in weights.items()}, inputs.read_as(theirs)


def _fitting(path: Path, weights: Weights, model: str, inputs: InputSpec) -> Weights:
    """The weights, whose names and shapes must be the model's."""
    shapes = build_network(model, inputs.shape, inputs.classes, inputs.reader()).shapes
    for name in dict.fromkeys((*shapes, *weights)):
        theirs = tuple(weights[name].shape) if name in weights else "missing"
        ours = shapes.get(name, "missing")
        _refuse_difference(path, f"'{name}' (the model is '{model}')", theirs, ours)
    return {n: weights[n].float() for n in shapes}


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
