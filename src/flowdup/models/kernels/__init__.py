"""Triton kernels for a cohort; what they compute is said where they are called (`models/`)."""

from flowdup.models.kernels.convolution import (
    Tile,
    conv,
    input_gradient,
    output_size,
    weight_gradient,
)
from flowdup.models.kernels.normalization import norm_affine, norm_gradient
from flowdup.models.kernels.pooling import unpool

__all__ = [
    "Tile",
    "conv",
    "input_gradient",
    "norm_affine",
    "norm_gradient",
    "output_size",
    "unpool",
    "weight_gradient",
]
