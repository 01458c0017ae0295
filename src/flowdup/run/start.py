"""Where a run may begin: the model that another run has learned for everyone, or a model file."""

from dataclasses import fields, replace
from pathlib import Path

from flowdup.data import InputSpec
from flowdup.errors import ConfigError
from flowdup.models import Weights
from flowdup.personalize import load, load_model


def load_start(path: Path, model: str, inputs: InputSpec) -> Weights:
    """The weights in a run folder or in a file that `PersonalModel.save` wrote.

    ConfigError if they are of another model or for other inputs than those given.
    """
    if path.is_dir():
        federation = load(path)
        name, theirs = federation.spec.model, federation.spec.inputs
        weights = federation.method.global_model(federation.psi)
    else:
        saved = load_model(path)
        name, theirs = saved.name, saved.inputs
        weights = {n: p.detach() for n, p in saved.module.named_parameters()}
    _refuse_difference(path, "model", name, model)
    if not (theirs.class_names and inputs.class_names):  # not everyone names them
        theirs = replace(theirs, class_names=inputs.class_names)
    for field in fields(InputSpec):
        _refuse_difference(path, field.name, *(getattr(s, field.name) for s in (theirs, inputs)))
    return {n: w.float().cpu().clone() for n, w in weights.items()}


def _refuse_difference(path: Path, what: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise ConfigError(
            f"a run cannot start from {path}: its {what} is {theirs} there and {ours} here; give "
            "a start that fits, or none"
        )
