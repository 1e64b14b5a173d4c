"""Cases of silu: x * sigmoid(x). Liger has no SiLU without a product."""

import torch.nn.functional as F

from .activations import *  # noqa: F403
from .case import ours

NAME = "silu"
tigon_fn = ours(NAME)
eager_fn = F.silu  # PyTorch's own
