"""Modules around the functions of :mod:`tigon`."""

from tigon.nn.cross_entropy import CrossEntropyLoss
from tigon.nn.rms_norm import RMSNorm
from tigon.nn.swiglu import SwiGLU

__all__ = ["CrossEntropyLoss", "RMSNorm", "SwiGLU"]
