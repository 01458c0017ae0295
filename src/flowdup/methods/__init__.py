"""The methods, by name.  A new one is a file beside these and a line in this table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowdup.errors import ConfigError
from flowdup.methods.base import Batch, Method
from flowdup.methods.fedavg import FedAvg, FedAvgConfig
from flowdup.methods.flowdup import FLowDUP, FLowDUPConfig
from flowdup.methods.ld_fedavg import LDFedAvg, LDFedAvgConfig
from flowdup.methods.parts import Parts
from flowdup.params import Params
from flowdup.settings import as_table, nearest, plain, read_settings, setting_paths

__all__ = ["METHODS", "Batch", "Method", "MethodConfig", "Params", "Parts"]

METHODS: dict[str, tuple[type[Any], type[Any]]] = {  # name: (settings, method)
    "fedavg": (FedAvgConfig, FedAvg),
    "flowdup": (FLowDUPConfig, FLowDUP),
    "ld-fedavg": (LDFedAvgConfig, LDFedAvg),
}


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
