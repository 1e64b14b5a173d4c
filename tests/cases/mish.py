"""Cases of mish: x * tanh(log(1 + e^x))."""

import torch.nn.functional as F

from .activations import *  # noqa: F403
from .case import ours

NAME = "mish"
tigon_fn = ours(NAME)
eager_fn = F.mish  # PyTorch's own
