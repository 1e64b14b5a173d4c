"""Sparsemax as a module."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.sparsemax import sparsemax


class Sparsemax(nn.Module):
    """:func:`tigon.sparsemax` over the last dimension.

    Shape: ``[..., C] -> [..., C]``.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sparsemax(x)
