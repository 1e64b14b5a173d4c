"""Modulated RMSNorm as a module."""

from __future__ import annotations

import torch

from tigon.nn.rms_norm import RMSNorm
from tigon.ops.modulated_rms_norm import modulated_rms_norm


class ModulatedRMSNorm(RMSNorm):
    """:func:`tigon.modulated_rms_norm` with a learned weight; scale and shift come with each call.

    Args: those of :class:`tigon.nn.RMSNorm`.

    Shape: x ``[..., C]``, scale and shift ``[C]``, ``[B, C]``, ``[B, 1, C]`` or x's ``-> [..., C]``.
    """

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        return modulated_rms_norm(
            x, self.weight, scale, shift, self.eps, offset=self.offset, rounding=self.rounding
        )
