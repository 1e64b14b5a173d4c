"""Cases of silu: x * sigmoid(x)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .activations import ACTIVATION_CASES, make  # noqa: F401
from .case import memory_bound

NAME = "silu"
CASES = ACTIVATION_CASES


def tigon_fn(x):
    """Tigon's own."""
    import tigon

    return tigon.silu(x)


def eager_fn(x):
    """PyTorch's own."""
    return F.silu(x)


def oracle_fn(x):
    """The formula, for fp64."""
    return x * torch.sigmoid(x)


bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3)  # x to y; x and dy to dx
PEERS = {}  # Liger has no SiLU without a product
