"""Cases of mish: x * tanh(log(1 + e^x))."""

import torch
import torch.nn.functional as F

from .activations import *  # noqa: F403
from .case import ours

NAME = "mish"
tigon_fn = ours(NAME)
eager_fn = F.mish  # PyTorch's own


def oracle_fn(x):
    """The formula, for fp64."""
    return x * torch.tanh(F.softplus(x))
