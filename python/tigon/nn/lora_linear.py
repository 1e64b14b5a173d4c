"""A linear map with a low-rank adapter as a module."""

from __future__ import annotations

import math

import torch
from torch import nn

from tigon.error import check
from tigon.ops.arguments import check_integers, check_numbers, checked_init, kind_of
from tigon.ops.lora_linear import lora_linear


class LoRALinear(nn.Module):
    """:func:`tigon.lora_linear` with a frozen weight and learned float32 adapters.

    Args:
        in_features, out_features: K and N.
        rank: r.
        alpha: the adapter is scaled by ``alpha / rank``; ``None``: twice the rank.
        dropout: dropout of the adapter's input, in training mode.
        bias: whether to add a bias, which is frozen too.
        device, dtype: of weight and bias. ``lora_a`` ``[r, K]`` starts uniform, ``lora_b`` ``[N, r]`` at 0.

    Shape: ``x [..., K] -> [..., N]``.
    """

    @checked_init
    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        self._build(nn.Linear(in_features, out_features, bias, device, dtype), rank, alpha, dropout)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, rank: int, *, alpha: float | None = None, dropout: float = 0.0
    ) -> LoRALinear:
        """Build the module from an existing linear map, whose weight and bias it shares and freezes."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._build(linear, rank, alpha, dropout)
        return made

    def _build(self, linear, rank, alpha, dropout):
        op = "nn.LoRALinear"
        check(op, isinstance(linear, nn.Linear), "linear must be an nn.Linear, got {}", kind_of(linear))
        check_integers(op, least=1, rank=rank)
        check_numbers(op, dropout=dropout)
        check(op, 0 <= dropout < 1, "dropout must be in [0, 1), got {}", dropout)
        if alpha is not None:
            check_numbers(op, alpha=alpha)
        self.rank, self.dropout = rank, dropout
        self.scale = 2.0 if alpha is None else alpha / rank
        self.weight, self.bias = linear.weight.requires_grad_(False), linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        n, k = self.weight.shape
        self.in_features, self.out_features = k, n
        like = {"device": self.weight.device, "dtype": torch.float32}
        self.lora_a = nn.Parameter(torch.empty(rank, k, **like))
        self.lora_b = nn.Parameter(torch.empty(n, rank, **like))
        self.reset_lora_parameters()

    def reset_parameters(self) -> None:
        """Initialise weight and bias as `torch.nn.Linear` does, and the adapter so that it adds nothing."""
        nn.Linear.reset_parameters(self)
        self.reset_lora_parameters()

    def reset_lora_parameters(self) -> None:
        """Initialise the adapter so that it adds nothing."""
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        return lora_linear(x, self.weight, self.lora_a, self.lora_b, self.scale, self.bias, dropout)

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """The weight of a single map equal to weight and adapter together, in the weight's dtype."""
        return (self.weight + self.scale * (self.lora_b @ self.lora_a)).to(self.weight.dtype)

    def extra_repr(self) -> str:
        n, k = self.weight.shape
        return f"{k}, {n}, rank={self.rank}, scale={self.scale}, dropout={self.dropout}"
