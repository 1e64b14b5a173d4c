"""Residual addition and RMSNorm as a module."""

from __future__ import annotations

import torch

from tigon.nn.rms_norm import RMSNorm
from tigon.ops.add_rms_norm import add_rms_norm


class AddRMSNorm(RMSNorm):
    """:func:`tigon.add_rms_norm` with a learned weight; arguments as :class:`RMSNorm`.

    Shape: ``[..., C], [..., C] -> [..., C], [..., C]``.
    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset, rounding=self.rounding)
