"""Mish (Misra 2019). Contract: ``csrc/tigon/ops/mish/mish.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon.ops.activation import activation


def reference(x):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    return F.mish(x)


@activation(reference)
def mish(x: torch.Tensor) -> torch.Tensor:
    """Activation ``x * tanh(log(1 + exp(x)))``; takes and returns what :func:`tigon.silu` does.

    Source: Misra 2019, "Mish: A Self Regularized Non-Monotonic Activation Function", arXiv:1908.08681.
    """
