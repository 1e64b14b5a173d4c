"""RMSNorm as a module."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.columns import check_eps, normalized_size
from tigon.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """:func:`tigon.rms_norm` with a learned weight.

    Args:
        hidden_size: size C of the last dimension; a sequence of one, as torch has it, will do.
        eps: added to the mean square.
        offset: added to the weight (Gemma: 1; the weight then starts at 0, else at 1).
        rounding: ``"llama"``, ``"gemma"`` or ``"none"``, see :func:`tigon.rms_norm`.
        elementwise_affine: ``False`` for no weight.

    Shape: ``[..., C] -> [..., C]``.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        rounding: str = "llama",
        elementwise_affine: bool = True,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        hidden_size = normalized_size("nn.RMSNorm", hidden_size)
        check_eps("nn.RMSNorm", eps)
        self.hidden_size, self.eps, self.offset, self.rounding = hidden_size, eps, offset, rounding
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight as at the start."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, rounding=self.rounding)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, rounding={self.rounding!r}, "
            f"elementwise_affine={self.weight is not None}"
        )
