"""flowdup: federated training that gives every client its own model, labels or not."""

from flowdup.config import Config, load_config, read_config
from flowdup.data import ClientData, InputSpec, Population, register_source
from flowdup.errors import FlowdupError
from flowdup.methods import register_method
from flowdup.metrics import register_metric
from flowdup.models import register_model
from flowdup.personalize import Federation, PersonalModel, load, load_model
from flowdup.run import certify_run, evaluate_model, evaluate_run, train_run
from flowdup.version import __version__

__all__ = [
    "ClientData",
    "Config",
    "Federation",
    "FlowdupError",
    "InputSpec",
    "PersonalModel",
    "Population",
    "__version__",
    "certify_run",
    "evaluate_model",
    "evaluate_run",
    "load",
    "load_config",
    "load_model",
    "read_config",
    "register_method",
    "register_metric",
    "register_model",
    "register_source",
    "train_run",
]
