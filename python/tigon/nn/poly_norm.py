"""PolyNorm as a module."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.columns import check_eps
from tigon.ops.poly_norm import poly_norm


class PolyNorm(nn.Module):
    """:func:`tigon.poly_norm` with a learned weight ``[3]``, at first 1/3 each, and bias ``[1]``, at first 1.

    Args:
        eps: added to the mean squares.

    Shape: ``[..., C] -> [..., C]``.
    """

    def __init__(self, eps: float = 1e-6, *, device=None, dtype=None):
        super().__init__()
        check_eps("nn.PolyNorm", eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight and bias as at the start."""
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.ones_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poly_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
