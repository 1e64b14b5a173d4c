"""Tigon: fused, exact, memory-lean kernels for training large language models.

Functions take and return plain tensors; :mod:`tigon.nn` wraps them in modules; :func:`tigon.apply` puts them
into a Hugging Face model. Everything refused raises :class:`tigon.Error` before anything is modified.
"""

from tigon import nn
from tigon.error import Error
from tigon.ops.add_rms_norm import add_rms_norm
from tigon.ops.cross_entropy import cross_entropy
from tigon.ops.dyt import dyt
from tigon.ops.gated_rms_norm import gated_rms_norm
from tigon.ops.group_norm import group_norm
from tigon.ops.head_memory import linear_cross_entropy_memory
from tigon.ops.labels import count_labels
from tigon.ops.layer_norm import layer_norm
from tigon.ops.linear_cross_entropy import linear_cross_entropy
from tigon.ops.linear_log_prob import linear_log_prob
from tigon.ops.linear_loss import linear_loss
from tigon.ops.relu_squared import relu_squared
from tigon.ops.rms_norm import rms_norm
from tigon.ops.rope import rope
from tigon.ops.softmax import softmax
from tigon.ops.swiglu import swiglu

__version__ = "0.1.0"

__all__ = [
    "Error",
    "add_rms_norm",
    "apply",
    "count_labels",
    "cross_entropy",
    "dyt",
    "gated_rms_norm",
    "group_norm",
    "layer_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_memory",
    "linear_log_prob",
    "linear_loss",
    "nn",
    "relu_squared",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
    "undo",
]


def __getattr__(name: str):
    """``tigon.apply`` and ``tigon.undo``, imported when first used: the ops alone need no transformers."""
    if name in ("apply", "undo"):
        from tigon import hf

        return getattr(hf, name)
    raise AttributeError(f"module 'tigon' has no attribute {name!r}")
