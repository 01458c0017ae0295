"""Where the clients of a round run.  Engines differ in speed only, never in what psi becomes."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flowdup.batches import cap_batch_size
from flowdup.client import ClientConfig
from flowdup.data.clients import ClientData
from flowdup.devices import parse_device
from flowdup.engines.base import Engine, Roster, SupportQuery
from flowdup.engines.batched import BatchedEngine
from flowdup.engines.distributed import DistributedEngine, is_distributed
from flowdup.engines.sequential import SequentialEngine
from flowdup.engines.trial import is_user_defined, why_not_vmap
from flowdup.errors import ConfigError
from flowdup.methods import Method
from flowdup.random import Stream
from flowdup.settings import check_range

__all__ = ["ENGINES", "Engine", "EngineConfig", "Roster", "SupportQuery", "build_engine"]

_HEAVY = 100e6  # operations

ENGINES = ("auto", "sequential", "batched")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of `engine`: where and how clients run; they change speed and rounding alone."""

    name: str = "auto"  # sequential or batched; auto: the faster one
    device: str = "auto"  # cpu, cuda or cuda:N; auto: a GPU if there is one
    dtype: str = "float32"  # of psi and all sums: float32 or float64
    clients_at_once: int = 0  # of the batched engine; 0: as many as fit in memory
    precision: str = "tf32"  # of products: float32, on a GPU tf32, or bf16 (networks, P v)
    compile: bool = True  # trace a step once; on a GPU, also fuse it: up to a minute

    def __post_init__(self) -> None:
        check_range("engine.clients_at_once", self.clients_at_once, 0)
        if self.name not in ENGINES:
            raise ConfigError(f"unknown engine '{self.name}': use one of {', '.join(ENGINES)}")
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"engine.dtype is float32 or float64, not '{self.dtype}'")
        if self.precision not in ("float32", "tf32", "bf16"):
            raise ConfigError(f"engine.precision is float32, tf32 or bf16, not '{self.precision}'")

    def torch_device(self) -> torch.device:
        """The device; `auto` is a GPU if there is one."""
        return parse_device(self.device)

    def torch_dtype(self) -> torch.dtype:
        """The type of psi and of all sums."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def compute_dtype(self) -> torch.dtype | None:
        """What networks and P v are computed in, if not in the type of psi."""
        return torch.bfloat16 if self.precision == "bf16" else None


def build_engine(
    config: EngineConfig,
    method: Method,
    client: ClientConfig,
    clients: Sequence[ClientData],
    stream: Stream,
    sees_each: bool = False,
) -> Engine:
    """The engine that a configuration asks for, with its clients; under torchrun, for this
    process's share of every cohort.  Clients draw their batches from the stream.  A model that
    `vmap` cannot run goes to the sequential engine, with a warning, and so does an aggregation
    that `sees_each` client's own reply.

    On a GPU this sets, for the whole process, the current GPU and what torch's products of float32
    are made of.
    """
    if method.batch_size not in (0, client.batch_size):
        raise ConfigError(
            f"method.batch_size = {method.batch_size} must be client.batch_size = "
            f"{client.batch_size}"
        )
    client = replace(client, batch_size=cap_batch_size(client.batch_size, clients))
    device, dtype = config.torch_device(), config.torch_dtype()
    on_gpu = device.type == "cuda"
    if on_gpu:
        if device.index is not None:
            torch.cuda.set_device(device)
        exact = config.precision == "float32"
        torch.set_float32_matmul_precision("highest" if exact else "high")
        convolution = torch.backends.cudnn.conv  # type: ignore[attr-defined]
        convolution.fp32_precision = "ieee" if exact else "tf32"
    name, tracing = config.name, config.compile
    obstacle = why_not_vmap(method, device, dtype) if is_user_defined(method) else ""
    if obstacle and name == "batched":
        raise ConfigError(
            f"torch's vmap cannot run this model for a cohort ({obstacle}): set engine.name = "
            "'auto' or 'sequential'"
        )
    if sees_each and (name == "batched" or is_distributed()):
        raise ConfigError(
            "server.aggregation and server.privacy need every client's own reply, and the batched "
            "engine and torchrun give sums: set engine.name = 'auto' and start one process"
        )
    if name == "auto":
        light = not obstacle and (on_gpu or not _heavy(method, client, dtype))
        if sees_each and light:
            warnings.warn(
                "server.aggregation and server.privacy need every client's own reply: clients run "
                "one after the other, which is slower",
                RuntimeWarning,
                stacklevel=2,
            )
        if obstacle:
            warnings.warn(
                f"torch's vmap cannot run this model for a cohort ({obstacle}): its clients run "
                "one after the other, as it is written, which is slower",
                RuntimeWarning,
                stacklevel=2,
            )
            tracing = False  # a trace would not follow a branch on values either
        name = "batched" if light and not sees_each else "sequential"
    common = method, client, clients, stream, device, dtype
    engine: Engine
    if name == "sequential":
        engine = SequentialEngine(*common, tracing)
    else:
        engine = BatchedEngine(*common, config.clients_at_once, on_gpu and config.compile)
    return DistributedEngine(engine, device, dtype) if is_distributed() else engine


def _heavy(method: Method, client: ClientConfig, dtype: torch.dtype) -> bool:
    """Whether a batch is so much work that on a CPU clients are faster one by one.

    Measured on two cores with perceptrons and CNNs: below 100 million operations for f on a batch
    all works were faster together (2 to 5 times); above it most were faster one by one (up to 3
    times), and the worst took half as long again.
    """
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415  (imports Triton)

    f = method.f
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        f({n: w.to(dtype) for n, w in f.init(Stream(0)).items()}, torch.zeros(1, *f.inputs))
    return bool(counter.get_total_flops() * client.batch_size > _HEAVY)
