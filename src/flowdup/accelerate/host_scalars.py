"""Async device-to-host copy of scalars; `read()` waits for this copy only."""

from collections.abc import Mapping

import torch
from torch import Tensor


class HostScalars:
    """Scalar tensors by name as they are now, on their way to the host as one float64 copy.

    On a GPU the copy is queued and the host goes on; work queued after it is not waited for.
    """

    def __init__(self, scalars: Mapping[str, Tensor]) -> None:
        self.names = list(scalars)
        values = torch.stack([scalar.detach().double() for scalar in scalars.values()])
        self.copied: torch.cuda.Event | None = None
        self.host = values
        if values.is_cuda:
            self.host = torch.empty_like(values, device="cpu", pin_memory=True)
            self.host.copy_(values, non_blocking=True)
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()

    def read(self) -> dict[str, float]:
        """The numbers, once the device has copied them."""
        if self.copied:
            self.copied.synchronize()
        return dict(zip(self.names, self.host.tolist(), strict=True))
