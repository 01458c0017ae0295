"""What is trained and sent: tensors by name."""

import hashlib
import math

import torch
from torch import Tensor

Params = dict[str, Tensor]


def prefixed(prefix: str, params: Params) -> Params:
    """The same tensors with a prefix before their names."""
    return {f"{prefix}{name}": p for name, p in params.items()}


def strip_prefix(params: Params, prefix: str) -> Params:
    """Those whose names start with the prefix, without it."""
    return {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}


def pack(params: Params) -> Tensor:
    """All numbers as one vector, in the order of the names."""
    return torch.cat([p.reshape(-1) for p in params.values()])


def digest(params: Params) -> bytes:
    """The SHA-256 of all numbers, in the order of the names."""
    whole = pack(params).detach().cpu().view(torch.uint8)
    return hashlib.sha256(whole.numpy().tobytes()).digest()


def unpack(vector: Tensor, like: Params) -> Params:
    """Views of a packed vector with the names and shapes of `like`."""
    parts = torch.split(vector, [math.prod(p.shape) for p in like.values()])
    return {n: part.view_as(like[n]) for n, part in zip(like, parts, strict=True)}
