"""Module form of :func:`tigon.swiglu`."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.swiglu import swiglu


class SwiGLU(nn.Module):
    """``silu(gate) * up``, see :func:`tigon.swiglu`; no parameters."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Gated activation of two tensors of one shape and dtype."""
        return swiglu(gate, up)
