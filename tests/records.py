"""Records of runs that nobody ran."""

from typing import Any

from flowdup.campaign.identity import deciding_settings
from flowdup.config import Config
from flowdup.settings import plain


def record(config: Config, validation: float, test: float | None = None) -> dict[str, Any]:
    """Of a run with this accuracy, in percent; without `test`, of one that was only trained."""
    found = {
        "settings": deciding_settings(config),
        "engine": plain(config.engine),
        "validation": validation,
        "round": 600,
        "seconds": 1.0,
        "device": "none",
        "versions": {"torch": "none"},
        "commit": "none",
    }
    if test is None:
        return found
    accuracy = {"accuracy": {"mean": test, "worst_decile": test - 10}}
    readings = {"transductive": accuracy, "held_out": accuracy}
    return found | {"k": 10, "cost": {"bytes_up": 4, "bytes_once": 0}, "test": readings}
