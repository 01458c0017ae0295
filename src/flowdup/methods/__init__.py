"""The methods, by name.  A new one is a file beside these and a line in this table."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowdup.errors import ConfigError
from flowdup.methods.base import Batch, Method, Objective
from flowdup.methods.fedavg import FedAvg, FedAvgConfig
from flowdup.methods.fedavg_em import FedAvgEM, FedAvgEMConfig
from flowdup.methods.fedavg_tent import FedAvgTent, FedAvgTentConfig
from flowdup.methods.fedprox import FedProx, FedProxConfig
from flowdup.methods.fedtta import FedTTA, FedTTAConfig
from flowdup.methods.flowdup import FLowDUP, FLowDUPConfig
from flowdup.methods.ld_fedavg import LDFedAvg, LDFedAvgConfig
from flowdup.methods.odpfl_hn import ODPFLHN, ODPFLHNConfig
from flowdup.methods.parts import Parts
from flowdup.methods.pefll import PeFLL, PeFLLConfig
from flowdup.params import Params
from flowdup.settings import as_table, nearest, plain, read_settings, setting_paths

__all__ = ["METHODS", "Batch", "Method", "MethodConfig", "Objective", "Params", "Parts", "summary"]

METHODS: dict[str, tuple[type[Any], type[Any]]] = {  # name: (settings, method)
    "flowdup": (FLowDUPConfig, FLowDUP),
    "fedavg": (FedAvgConfig, FedAvg),
    "fedprox": (FedProxConfig, FedProx),
    "ld-fedavg": (LDFedAvgConfig, LDFedAvg),
    "fedtta": (FedTTAConfig, FedTTA),
    "fedavg-tent": (FedAvgTentConfig, FedAvgTent),
    "fedavg-em": (FedAvgEMConfig, FedAvgEM),
    "pefll": (PeFLLConfig, PeFLL),
    "odpfl-hn": (ODPFLHNConfig, ODPFLHN),
}


def summary(name: str) -> str:
    """What a method is, in one line."""
    text = inspect.getdoc(inspect.getmodule(METHODS[name][1])) or ""
    return text.splitlines()[0].partition(": ")[2].rstrip(".")


@dataclass(frozen=True)
class MethodConfig:
    """A method's name and its own settings; in a table, `name` stands beside the settings."""

    name: str
    settings: Any

    @classmethod
    def from_table(cls, table: Any, prefix: str = "method.") -> "MethodConfig":
        rest = dict(as_table(table, prefix))
        name = rest.pop("name", "flowdup")
        if not isinstance(name, str) or name not in METHODS:
            near = nearest(str(name), list(METHODS))
            raise ConfigError(f"unknown method '{name}'{near}: use one of {', '.join(METHODS)}")
        return cls(name, read_settings(METHODS[name][0], rest, prefix))

    @staticmethod
    def paths(prefix: str) -> Iterator[str]:
        for settings, _ in METHODS.values():
            yield from setting_paths(settings, prefix)

    def table(self) -> dict[str, Any]:
        settings: dict[str, Any] = plain(self.settings)
        return {"name": self.name} | settings

    def build(self, parts: Parts) -> Method:
        method: Method = METHODS[self.name][1](self.settings, parts)
        return method
