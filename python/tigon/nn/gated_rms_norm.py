"""Gated RMSNorm as a module."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.gated_rms_norm import gated_rms_norm


class GatedRMSNorm(nn.Module):
    """:func:`tigon.gated_rms_norm` with a learned weight, which starts at one.

    Args:
        hidden_size: size C of the last dimension.
        eps: added to the mean square.
        norm_before_gate, group_size, activation, rounding: see :func:`tigon.gated_rms_norm`.

    Shape: ``[..., C], [..., C] -> [..., C]``.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        norm_before_gate: bool = True,
        group_size: int | None = None,
        activation: str = "silu",
        rounding: str = "llama",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.options = {
            "norm_before_gate": norm_before_gate,
            "group_size": group_size,
            "activation": activation,
            "rounding": rounding,
        }
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight as at the start."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps, **self.options)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.hidden_size}, eps={self.eps}, {options}"
