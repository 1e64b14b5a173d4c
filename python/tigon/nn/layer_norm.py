"""LayerNorm as a module."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.columns import check_eps, normalized_size
from tigon.ops.layer_norm import layer_norm


class LayerNorm(nn.Module):
    """:func:`tigon.layer_norm` with learned weight and bias, :class:`torch.nn.LayerNorm` over one dimension.

    Args:
        hidden_size: size C of the last dimension; a sequence of one, as torch has it, will do.
        eps: added to the variance.
        elementwise_affine: ``False`` for neither weight nor bias.
        bias: ``False``: only a weight.

    Shape: ``[..., C] -> [..., C]``.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        hidden_size = normalized_size("nn.LayerNorm", hidden_size)
        check_eps("nn.LayerNorm", eps)
        self.hidden_size, self.eps = hidden_size, eps
        for name, there in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            value = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if there else None
            self.register_parameter(name, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1 and bias 0, as at the start."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, elementwise_affine={self.weight is not None}, "
            f"bias={self.bias is not None}"
        )
