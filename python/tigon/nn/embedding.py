"""Embedding as a module."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.arguments import checked_init
from tigon.ops.embedding import check_padding, embedding


class Embedding(nn.Module):
    """:func:`tigon.embedding` with a learned table: :class:`torch.nn.Embedding` without norms and sparsity.

    Args:
        num_embeddings: rows V of the table.
        embedding_dim: columns H.
        padding_idx: the id whose row starts at zero and gets no gradient.
        scale: factor of the rows.

    Shape: ``[...] -> [..., H]``.
    """

    @checked_init
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        scale: float = 1.0,
        *,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        if padding_idx is not None:
            check_padding("nn.Embedding", padding_idx, num_embeddings)
        self.num_embeddings, self.embedding_dim, self.scale = num_embeddings, embedding_dim, scale
        self.padding_idx = padding_idx
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal numbers, zero for the padding row, as :class:`torch.nn.Embedding` does."""
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].fill_(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return embedding(ids, self.weight, padding_idx=self.padding_idx, scale=self.scale)

    def extra_repr(self) -> str:
        extra = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        extra += "" if self.scale == 1.0 else f", scale={self.scale}"
        return f"{self.num_embeddings}, {self.embedding_dim}{extra}"
