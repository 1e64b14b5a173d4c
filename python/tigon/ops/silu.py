"""SiLU (Elfwing et al. 2017; Hendrycks & Gimpel 2016). Contract: ``csrc/tigon/ops/silu/silu.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon.ops.activation import activation


def reference(x):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    return F.silu(x)


@activation(reference)
def silu(x: torch.Tensor) -> torch.Tensor:
    """Activation ``x * sigmoid(x)``; for ``silu(gate) * up`` see :func:`tigon.swiglu`.

    Args:
        x: any shape, float32, bfloat16 or float16. Rows may lie apart in memory; any other layout is copied
            once. float64 runs the eager reference.

    Returns:
        x's shape and dtype, contiguous. Differentiable, ``dx = dy * s * (1 + x * (1 - s))`` with
        ``s = sigmoid(x)``; arithmetic in float32, rounded once; bitwise deterministic. x is kept for the
        backward by reference and never written.

    Raises:
        tigon.Error: x is no float tensor.

    Source: Elfwing et al. 2017, "Sigmoid-Weighted Linear Units for Neural Network Function Approximation in
    Reinforcement Learning", arXiv:1702.03118, equation 5.
    """
