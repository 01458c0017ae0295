"""Triton kernels for a cohort; the layers that call them (one folder up) say what they compute.

Importing this needs Triton: `dispatch.kernels_for` does so, once it is known to be of use.
"""

from flowdup.accelerate.kernels.convolution import (
    Tile,
    conv,
    input_gradient,
    output_size,
    weight_gradient,
)
from flowdup.accelerate.kernels.normalization import norm_affine, norm_gradient
from flowdup.accelerate.kernels.pooling import unpool

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
