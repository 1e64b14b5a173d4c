"""Modules around the functions of :mod:`tigon`."""

from tigon.nn.cross_entropy import CrossEntropyLoss
from tigon.nn.glu import GeGLU, ReGLU, SwiGLU, SwiGLUOAI
from tigon.nn.linear_cross_entropy import LinearCrossEntropyLoss
from tigon.nn.rms_norm import RMSNorm

__all__ = ["CrossEntropyLoss", "GeGLU", "LinearCrossEntropyLoss", "RMSNorm", "ReGLU", "SwiGLU", "SwiGLUOAI"]
