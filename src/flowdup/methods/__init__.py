"""The methods, by name.  A new one is a file beside these and a line in this table; one of a
user's own is a file anywhere that calls `flowdup.register_method`.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from flowdup.errors import ConfigError, shorten
from flowdup.methods.arm_cml import ARMCML, ARMCMLConfig
from flowdup.methods.atp import ATP, ATPConfig
from flowdup.methods.base import Batch, Deployed, Method, NoSettings, Objective
from flowdup.methods.context import MethodContext
from flowdup.methods.corrected import Corrected
from flowdup.methods.fedavg import FedAvg
from flowdup.methods.fedavg_em import FedAvgEM, FedAvgEMConfig
from flowdup.methods.fedavg_la import FedAvgLA, FedAvgLAConfig
from flowdup.methods.fedavg_pseudo import FedAvgPseudo, FedAvgPseudoConfig
from flowdup.methods.fedavg_tent import FedAvgTent, FedAvgTentConfig
from flowdup.methods.fedprox import FedProx, FedProxConfig
from flowdup.methods.fedtta import FedTTA, FedTTAConfig
from flowdup.methods.flowdup import FLowDUP, FLowDUPConfig
from flowdup.methods.flowdup_plus import FLowDUPPlus, FLowDUPPlusConfig
from flowdup.methods.flux import FLUX, FLUXConfig
from flowdup.methods.lame import LAME, LAMEConfig
from flowdup.methods.ld_fedavg import LDFedAvg, LDFedAvgConfig
from flowdup.methods.odpfl_hn import ODPFLHN, ODPFLHNConfig
from flowdup.methods.pefll import PeFLL, PeFLLConfig
from flowdup.params import Params
from flowdup.registry import Registry
from flowdup.settings import as_table, check_range, plain, read_settings, setting_paths

__all__ = [
    "METHODS",
    "Batch",
    "Deployed",
    "Method",
    "MethodConfig",
    "MethodContext",
    "NoSettings",
    "Objective",
    "Params",
    "register_method",
    "summary",
]


CORRECTIONS = ("none", "em")


@dataclass(frozen=True)
class CommonSettings:
    """What every method has."""

    correction: str = "none"  # of personal models for how often classes occur: none or em
    init_scale: float = 1.0  # of networks' first weights, times He's; torch's own are 0.41 of them

    def __post_init__(self) -> None:
        check_range("method.init_scale", self.init_scale, 1e-3, 1e3)
        if self.correction not in CORRECTIONS:
            raise ConfigError(
                f"method.correction is {' or '.join(map(repr, CORRECTIONS))}, not "
                f"'{shorten(self.correction)}'"
            )


_COMMON = {f.name for f in fields(CommonSettings)}


class MethodEntry(NamedTuple):
    """What the registry knows of a method: its class and that of its settings."""

    method: type[Any]  # called with its settings and a MethodContext
    settings: type[Any]  # a frozen dataclass with a default for every field


METHODS = Registry(
    "method",
    {
        "flowdup": MethodEntry(FLowDUP, FLowDUPConfig),
        "flowdup-plus": MethodEntry(FLowDUPPlus, FLowDUPPlusConfig),
        "fedavg": MethodEntry(FedAvg, NoSettings),
        "fedprox": MethodEntry(FedProx, FedProxConfig),
        "ld-fedavg": MethodEntry(LDFedAvg, LDFedAvgConfig),
        "fedtta": MethodEntry(FedTTA, FedTTAConfig),
        "fedavg-tent": MethodEntry(FedAvgTent, FedAvgTentConfig),
        "fedavg-pseudo": MethodEntry(FedAvgPseudo, FedAvgPseudoConfig),
        "fedavg-la": MethodEntry(FedAvgLA, FedAvgLAConfig),
        "fedavg-em": MethodEntry(FedAvgEM, FedAvgEMConfig),
        "lame": MethodEntry(LAME, LAMEConfig),
        "atp": MethodEntry(ATP, ATPConfig),
        "flux": MethodEntry(FLUX, FLUXConfig),
        "arm-cml": MethodEntry(ARMCML, ARMCMLConfig),
        "pefll": MethodEntry(PeFLL, PeFLLConfig),
        "odpfl-hn": MethodEntry(ODPFLHN, ODPFLHNConfig),
    },
)


def register_method(name: str, method: type[Method], settings: type[Any] = NoSettings) -> None:
    """Make a method available under a name that configurations and checkpoints can use.

    `method(settings, context)` builds it; `settings` is a frozen dataclass whose fields all have
    defaults.  `flowdup check` tries whether it keeps the laws of a method.
    """
    if Method not in method.__mro__:
        raise ConfigError(f"the class of method '{name}' must be a subclass of Method")
    if taken := {"name", *_COMMON} & {f.name for f in fields(settings)}:
        raise ConfigError(
            f"method '{name}' has a setting '{min(taken)}', as every method has one: rename it"
        )
    try:
        settings()
    except TypeError as error:
        raise ConfigError(f"the settings of method '{name}' need defaults: {error}") from None
    METHODS.register(name, MethodEntry(method, settings))


def summary(name: str) -> str:
    """What a method is, in one line: the first of its file's docstring, after the name, or of its
    class's where a file has several.
    """
    method = METHODS[name].method
    alone = [e.method.__module__ for e in METHODS.values()].count(method.__module__) == 1
    text = (inspect.getdoc(inspect.getmodule(method)) if alone else "") or method.__doc__ or ""
    first = text.strip().partition("\n")[0]
    return (first.partition(": ")[2] or first).rstrip(".")


@dataclass(frozen=True)
class MethodConfig:
    """A method's name and its own settings; in a table, `name` stands beside the settings."""

    name: str  # of the method: `flowdup methods` lists them
    settings: Any
    common: CommonSettings = CommonSettings()

    @classmethod
    def from_table(cls, table: Any, prefix: str = "method.") -> "MethodConfig":
        """Read from a table of settings, whose names are checked."""
        table = as_table(table, prefix)
        name = table.get("name", "flowdup")
        common = {key: value for key, value in table.items() if key in _COMMON}
        own = {key: value for key, value in table.items() if key not in {"name", *_COMMON}}
        settings = METHODS.find(name).settings
        return cls(
            name,
            read_settings(settings, own, prefix),
            read_settings(CommonSettings, common, prefix),
        )

    @staticmethod
    def paths(prefix: str) -> Iterator[str]:
        """Paths of all settings that any method has."""
        yield from setting_paths(CommonSettings, prefix)
        for entry in METHODS.values():
            yield from setting_paths(entry.settings, prefix)

    def table(self) -> dict[str, Any]:
        """As a configuration has it."""
        common: dict[str, Any] = plain(self.common)
        settings: dict[str, Any] = plain(self.settings)
        return {"name": self.name} | common | settings

    def build(self, context: MethodContext) -> Method:
        """The method, corrected for class shares if the settings ask for it."""
        context = replace(context, init_scale=self.common.init_scale)
        method: Method = METHODS[self.name].method(self.settings, context)
        return method if self.common.correction == "none" else Corrected(method, context)
