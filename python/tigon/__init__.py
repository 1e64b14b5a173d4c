"""Tigon: fused, exact, memory-lean kernels for training large language models."""

from tigon.error import Error
from tigon.ops.rms_norm import rms_norm
from tigon.ops.swiglu import swiglu

__version__ = "0.1.0"

__all__ = [
    "Error",
    "rms_norm",
    "swiglu",
]
