"""Medusa heads: each predicts a token further ahead from the trunk's hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import Unpack

from tigon.error import check
from tigon.ops.arguments import check_integers, checked_init
from tigon.ops.loss_head.multi_token import MultiTokenLoss, multi_token_loss
from tigon.ops.loss_head.options import MultiTokenDict


class ZeroLinear(nn.Linear):
    """A Linear initialised to zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ResBlock(nn.Module):
    """``x + silu(linear(x))``; linear starts at zero, so that the block starts as the identity."""

    def __init__(self, hidden_size: int, device=None, dtype=None) -> None:
        super().__init__()
        self.linear = ZeroLinear(hidden_size, hidden_size, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """`num_heads` heads, each of `num_layers` residual blocks and a last ``Linear`` without bias.

    The state dict has the names of the Medusa repository's ``medusa_head``: ``0.0.linear.weight``,
    ``0.0.linear.bias``, ..., ``0.<num_layers>.weight``. Blocks start as the identity. After
    :meth:`copy_head` every head starts equal to the model's head.

    Args:
        hidden_size, vocab_size: sizes of the model's head, > 0.
        num_heads: > 0; head i (from 0) predicts the token at t + 2 + i from the hidden state at t.
        num_layers: >= 0 residual blocks of each head.

    Source: Cai et al. 2024, "Medusa" (arXiv:2401.10774), section 2.1.
    """

    @checked_init
    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int = 5,
        num_layers: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_heads": num_heads}
        check_integers("MedusaHeads", **sizes, num_layers=num_layers)
        for name, size in sizes.items():
            check("MedusaHeads", size > 0, name + " must be > 0, got {}", size)
        check("MedusaHeads", num_layers >= 0, "num_layers must be >= 0, got {}", num_layers)
        to = {"device": device, "dtype": dtype}
        super().__init__(
            nn.Sequential(
                *(ResBlock(hidden_size, **to) for _ in range(num_layers)),
                nn.Linear(hidden_size, vocab_size, bias=False, **to),
            )
            for _ in range(num_heads)
        )

    def __getitem__(self, index: int | slice) -> nn.Module:
        return nn.ModuleList(list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)

    @torch.no_grad()
    def copy_head(self, weight: torch.Tensor) -> MedusaHeads:
        """Copy `weight`, ``[V, H]``, the model's head, to the last weight of every head; return self."""
        wanted = self[0][-1].weight.shape
        check("MedusaHeads", weight.shape == wanted, "weight must be {}, got {}", wanted, weight.shape)
        for head in self:
            head[-1].weight.copy_(weight)
        return self

    def forward(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        head: torch.Tensor | nn.Linear | None = None,
        scale: float = 1.0,
        decay: float = 0.8,
        **options: Unpack[MultiTokenDict],
    ) -> torch.Tensor | MultiTokenLoss:
        """Logits ``[num_heads, ..., V]``, or with labels :func:`tigon.multi_token_loss`.

        Args:
            hidden: ``[..., T, H]``, the last hidden states of the model.
            labels: ``[..., T]`` class indices, not shifted.
            head: the model's head, whose loss (for the next token, coefficient 1) comes first, for joint
                training (Medusa-2). ``None``: only the Medusa heads (Medusa-1); then the caller detaches
                `hidden` or computes it with a frozen model.
            scale, decay: head i has the coefficient ``scale * decay ** i``, with i from 1 as in the paper.
            **options: options of :func:`tigon.multi_token_loss`.
        """
        if labels is None:
            return torch.stack([one(hidden) for one in self])
        first = 1 if head is None else 0
        options.setdefault(
            "coefficients", [scale * decay**i if i else 1.0 for i in range(first, len(self) + 1)]
        )
        options.setdefault("shifts", range(first + 1, len(self) + 2))
        return multi_token_loss(hidden, [*([] if head is None else [head]), *self], labels, **options)
