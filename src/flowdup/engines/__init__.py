"""Where the clients of a round run.  Engines differ in speed only, never in what psi becomes."""

from dataclasses import dataclass

import torch

from flowdup.client import ClientConfig
from flowdup.engines.base import Engine, Question
from flowdup.engines.batched import BatchedEngine
from flowdup.engines.distributed import DistributedEngine, local_rank, several
from flowdup.engines.sequential import SequentialEngine
from flowdup.errors import ConfigError
from flowdup.methods import Method
from flowdup.settings import check_range

__all__ = ["ENGINES", "Engine", "EngineConfig", "Question", "build_engine"]

ENGINES = ("sequential", "batched")


@dataclass(frozen=True)
class EngineConfig:
    name: str = "batched"
    device: str = "auto"  # auto: a GPU if there is one
    dtype: str = "float32"  # float32 or float64
    clients_at_once: int = 0  # batched: 0 runs the whole cohort together

    def __post_init__(self) -> None:
        check_range("engine.clients_at_once", self.clients_at_once, 0)

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device(f"cuda:{local_rank()}" if torch.cuda.is_available() else "cpu")
        known = ["cpu", "cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        if self.device not in known:
            raise ConfigError(f"unknown device '{self.device}': use auto, {', '.join(known)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("no CUDA device is available: set engine.device to cpu")
        return torch.device(self.device)

    def torch_dtype(self) -> torch.dtype:
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"engine.dtype is float32 or float64, not '{self.dtype}'")
        return torch.float64 if self.dtype == "float64" else torch.float32


def build_engine(config: EngineConfig, method: Method, client: ClientConfig) -> Engine:
    """The engine that a configuration asks for; under torchrun, for this process's share."""
    device, dtype = config.torch_device(), config.torch_dtype()
    if config.name not in ENGINES:
        raise ConfigError(f"unknown engine '{config.name}': use one of {', '.join(ENGINES)}")
    engine: Engine
    if config.name == "sequential":
        engine = SequentialEngine(method, client, device, dtype)
    else:
        engine = BatchedEngine(method, client, device, dtype, config.clients_at_once)
    return DistributedEngine(engine, device, dtype) if several() else engine
