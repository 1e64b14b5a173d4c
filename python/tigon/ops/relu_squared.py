"""Squared ReLU (So et al. 2021, "Primer"). Contract: ``csrc/tigon/ops/relu_squared/relu_squared.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon.ops.activation import activation


def reference(x):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    return F.relu(x).square()


@activation(reference)
def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Activation ``relu(x)^2``, ``dx = 2 * relu(x) * dy``; takes and returns what :func:`tigon.silu` does.

    Source: So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling",
    arXiv:2109.08668.
    """
