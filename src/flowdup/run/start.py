"""Where a run may begin: at the model that another run has learned for everyone, at a model file,
or at another run's psi.
"""

from pathlib import Path

from flowdup.checkpoint import checkpoint_in, load_checkpoint
from flowdup.data import MEMORY, DataConfig, InputSpec
from flowdup.data.sources import SOURCES
from flowdup.errors import CheckpointError, ConfigError, FlowdupError, shorten
from flowdup.federation_spec import FederationSpec
from flowdup.methods import Params
from flowdup.models import Weights, build_network
from flowdup.personalize import load, load_model
from flowdup.stored_tensors import FLOATS, StoredTensors, all_finite, load_tensors, open_tensors

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
            f"`start` names {path}, which does not exist: give a run folder, or a safetensors file "
            "of a model's weights"
        )
    if path.is_dir():
        federation = load(path)
        name, theirs = federation.spec.model, federation.spec.inputs
        try:
            weights = federation.method.global_model(federation.psi)
        except FlowdupError as error:
            raise ConfigError(f"a run cannot start from {path}: {error}") from None
    elif plain := _plain_weights(path, model, inputs):
        return plain, inputs
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


def check_reading(data: DataConfig, start: str, inputs: InputSpec) -> None:
    """Refuse settings of a user's own data by which inputs would not be read as the start does."""
    if data.source == MEMORY or data.source in SOURCES or (data.normalize and not data.mean):
        return
    if (data.mean, data.std) != (inputs.mean, inputs.std):
        raise ConfigError(
            f"a run cannot start from {start} with other data.mean and data.std than its own, "
            f"{inputs.mean} and {inputs.std}: leave them empty, and data.normalize = true"
        )


def _plain_weights(path: Path, model: str, inputs: InputSpec) -> Weights:
    """Of a safetensors file of anybody's; none if it says what it is, which `load_model` reads."""
    try:
        with open_tensors(path) as file:
            if "flowdup" in file.metadata:
                return {}
            names = _check_fit(path, file, model, inputs)
            weights = load_tensors(file.read())
        if not all_finite(weights):
            raise ValueError("it holds NaN or infinite numbers")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"cannot read weights in {path} ({why}): give a run folder, a model that flowdup "
            "saved, or a model's parameters as safetensors.torch.save_file writes them"
        ) from None
    return {n: weights[n].float() for n in names}


def _check_fit(path: Path, file: StoredTensors, model: str, inputs: InputSpec) -> list[str]:
    """The names of the model's weights, which must be those of the file, with the same shapes."""
    shapes = build_network(model, inputs.shape, inputs.classes, inputs.reader()).shapes
    for name in dict.fromkeys((*shapes, *file.tensors)):
        if name not in shapes:
            raise ConfigError(
                f"a run cannot start from {path}: '{name}' is no parameter of the model '{model}', "
                f"which has {shorten(', '.join(shapes), 200)}; store these alone, by these names, "
                "without buffers and prefixes"
            )
        theirs = file.tensors[name].shape if name in file.tensors else "missing"
        _refuse_difference(path, f"'{name}' (the model is '{model}')", theirs, shapes[name])
        if (dtype := file.tensors[name].dtype) not in FLOATS:
            raise ValueError(f"its '{name}' is of type {dtype}")
    return list(shapes)


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
