"""SiLU as a module."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.silu import silu


class SiLU(nn.Module):
    """``x * sigmoid(x)``, see :func:`tigon.silu`. Shape: any, and the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu(x)
