"""Dynamic Tanh as a module."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.dyt import dyt


class DyT(nn.Module):
    """:func:`tigon.dyt` with learned alpha, weight and bias.

    Args:
        hidden_size: size C of the last dimension.
        init_alpha: alpha at the start.
        bias: ``False`` for none.

    Shape: ``[..., C] -> [..., C]``.
    """

    def __init__(
        self, hidden_size: int, init_alpha: float = 0.5, *, bias: bool = True, device=None, dtype=None
    ):
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        empty = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", empty)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Alpha, weight 1 and bias 0 as at the start."""
        nn.init.constant_(self.alpha, self.init_alpha)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dyt(x, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, bias={self.bias is not None}"
