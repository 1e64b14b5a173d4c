"""GroupNorm as a module."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.columns import check_eps
from tigon.ops.group_norm import check_groups, group_norm


class GroupNorm(nn.Module):
    """:func:`tigon.group_norm` with learned weight and bias, as :class:`torch.nn.GroupNorm`.

    Args:
        num_groups: a divisor of ``num_channels``.
        num_channels: size C of the second dimension.
        eps: added to the variance.
        affine: ``False`` for neither weight nor bias.

    Shape: ``[N, C, ...] -> [N, C, ...]``.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_groups("nn.GroupNorm", "num_groups", num_groups, num_channels)
        check_eps("nn.GroupNorm", eps)
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        for name in ("weight", "bias"):
            value = torch.empty(num_channels, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(value) if affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1 and bias 0, as at the start."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.weight is not None}"
