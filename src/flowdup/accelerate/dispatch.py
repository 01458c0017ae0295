"""Which implementation a layer for cohorts takes: our Triton kernels, or torch's operations.

Kernels are imported when first needed, on a GPU of compute capability 8.0 or higher (or under
Triton's interpreter, for tests), and never elsewhere.
"""

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from flowdup.accelerate import torch_private


def kernels_for(*tensors: Tensor | None) -> ModuleType | None:
    """`flowdup.accelerate.kernels` if its kernels can read these tensors, else None.

    They read float32 or bfloat16, all of one type, on one device, none empty.
    """
    given = [t for t in tensors if t is not None]
    dtype, device = given[0].dtype, given[0].device
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    if any(t.dtype != dtype or t.device != device or t.numel() == 0 for t in given):
        return None
    return _load_kernels(device)


@functools.cache
def _load_kernels(device: torch.device) -> ModuleType | None:
    if device.type == "cuda":
        able = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        able = os.environ.get("TRITON_INTERPRET") == "1"  # slow, for tests
    if not able or torch_private.look_up("triton") is None:
        return None
    return importlib.import_module("flowdup.accelerate.kernels")
