"""Data: sources of images, the paper's partitions, and a user's own clients."""

from flowdup.data.clients import ClientData, LazyClients, Population
from flowdup.data.data_config import MEMORY, DataConfig
from flowdup.data.input_spec import InputSpec
from flowdup.data.population import load_population, register_source

__all__ = [
    "MEMORY",
    "ClientData",
    "DataConfig",
    "InputSpec",
    "LazyClients",
    "Population",
    "load_population",
    "register_source",
]
