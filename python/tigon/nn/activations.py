"""Activations as modules without parameters."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops import glu
from tigon.ops.arguments import checked_init
from tigon.ops.silu import silu
from tigon.ops.sparsemax import sparsemax


class SiLU(nn.Module):
    """``x * sigmoid(x)``, see :func:`tigon.silu`. Shape: any; the output has the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu(x)


class Sparsemax(nn.Module):
    """:func:`tigon.sparsemax` over the last dimension.

    Shape: ``[..., C] -> [..., C]``.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sparsemax(x)


class SwiGLU(nn.Module):
    """``silu(gate) * up``, see :func:`tigon.swiglu`; ``up=None`` if gate holds both."""

    @checked_init
    def __init__(
        self, gate_multiplier: float = 1.0, down_multiplier: float = 1.0, limit: float | None = None
    ) -> None:
        super().__init__()
        self.gate_multiplier, self.down_multiplier = gate_multiplier, down_multiplier
        self.limit = limit

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return glu.swiglu(
            gate,
            up,
            gate_multiplier=self.gate_multiplier,
            down_multiplier=self.down_multiplier,
            limit=self.limit,
        )

    def extra_repr(self) -> str:
        numbers = f"gate_multiplier={self.gate_multiplier}, down_multiplier={self.down_multiplier}"
        return numbers if self.limit is None else f"{numbers}, limit={self.limit}"


class GeGLU(nn.Module):
    """``gelu(gate) * up``, see :func:`tigon.geglu`; ``up=None`` if gate holds both."""

    @checked_init
    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return glu.geglu(gate, up, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class ReGLU(nn.Module):
    """``relu(gate) * up``, see :func:`tigon.reglu`; ``up=None`` if gate holds both."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return glu.reglu(gate, up)


class SwiGLUOAI(nn.Module):
    """The clamped SwiGLU of gpt-oss, see :func:`tigon.swiglu_oai`."""

    @checked_init
    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return glu.swiglu_oai(gate_up, alpha=self.alpha, limit=self.limit)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, limit={self.limit}"
