"""Cases of relu_squared: relu(x)^2."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .activations import ACTIVATION_CASES, make  # noqa: F401
from .case import liger, memory_bound

NAME = "relu_squared"
CASES = ACTIVATION_CASES


def tigon_fn(x):
    """Tigon's own."""
    import tigon

    return tigon.relu_squared(x)


def eager_fn(x):
    """As Hugging Face's ReLUSquaredActivation has it."""
    return torch.square(F.relu(x))


def oracle_fn(x):
    """The formula, for fp64."""
    r = F.relu(x)  # whose gradient keeps NaN, unlike clamp_min's
    return r * r


bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3)  # x to y; x and dy to dx
PEERS = {"liger": liger("relu_squared", "LigerReLUSquaredFunction")}
