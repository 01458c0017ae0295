"""The methods, by name.  A new one is a file beside these and a line in this table."""

from typing import Any

from flowdup.methods.base import Batch, Method, Params
from flowdup.methods.fedavg import FedAvg, FedAvgConfig
from flowdup.methods.flowdup import FLowDUP, FLowDUPConfig
from flowdup.methods.ld_fedavg import LDFedAvg, LDFedAvgConfig
from flowdup.methods.parts import Parts

__all__ = ["METHODS", "Batch", "Method", "Params", "Parts"]

METHODS: dict[str, tuple[type[Any], type[Any]]] = {  # name: (settings, method)
    "fedavg": (FedAvgConfig, FedAvg),
    "flowdup": (FLowDUPConfig, FLowDUP),
    "ld-fedavg": (LDFedAvgConfig, LDFedAvg),
}
