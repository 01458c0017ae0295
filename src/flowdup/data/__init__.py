"""Data: sources of images, the paper's partitions, and a user's own clients."""

from flowdup.data.clients import ClientData, LazyClients
from flowdup.data.data_config import MEMORY, DataConfig
from flowdup.data.input_spec import InputSpec
from flowdup.data.loading import load_population, register_source
from flowdup.data.population import Population

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
