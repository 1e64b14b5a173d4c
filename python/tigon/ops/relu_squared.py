"""Squared ReLU (So et al. 2021, "Primer"). Contract: ``csrc/tigon/ops/relu_squared/relu_squared.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon.ops.activation import activation


def reference(x):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    return F.relu(x).square()


_call = activation("relu_squared", reference)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Activation ``relu(x)^2``.

    Args:
        x: ``[..., F]`` float32, bfloat16 or float16. Rows may lie apart in memory; any other layout is copied
            once. float64 runs the eager reference.

    Returns:
        ``[..., F]`` in x's dtype, contiguous. Differentiable, ``dx = 2 * relu(x) * dy``; arithmetic in
        float32, rounded once; bitwise deterministic. x is kept for the backward by reference and never
        written.

    Raises:
        tigon.Error: x is no float tensor.

    Source: So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling",
    arXiv:2109.08668.
    """
    return _call(x)
