"""Data: sources of images, the paper's partitions, and a user's own clients."""

from flowdup.data.clients import ClientData, InputSpec, LazyClients, Population
from flowdup.data.population import DataConfig, load_population, register_source

__all__ = [
    "ClientData",
    "DataConfig",
    "InputSpec",
    "LazyClients",
    "Population",
    "load_population",
    "register_source",
]
