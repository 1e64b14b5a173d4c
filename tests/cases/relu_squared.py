"""Cases of relu_squared: relu(x)^2."""

import torch
import torch.nn.functional as F

from .activations import *  # noqa: F403
from .case import liger, ours

NAME = "relu_squared"
PEERS = {"liger": liger("relu_squared", "LigerReLUSquaredFunction")}
tigon_fn = ours(NAME)


def eager_fn(x):
    """As Hugging Face's ReLUSquaredActivation has it."""
    return torch.square(F.relu(x))
