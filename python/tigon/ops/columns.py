"""What the norms take: rows of columns, and vectors by column (weight and bias)."""

from __future__ import annotations

import torch

from tigon.error import refuse


def check_rows(op: str, x: torch.Tensor, eps: float = 0.0) -> None:
    """x must be float with at least one dimension, eps not negative."""
    if not x.is_floating_point():
        refuse(op, "x must be a float tensor, got {}", x.dtype)
    if x.dim() == 0:
        refuse(op, "x must have at least one dimension, got 0")
    if not eps >= 0:
        refuse(op, "eps must be >= 0, got {}", eps)


def check_column_vector(op: str, name: str, v: torch.Tensor | None, columns: int) -> None:
    """A vector that is there must be float and of that length."""
    if v is None:
        return
    if not v.is_floating_point():
        refuse(op, name + " must be a float tensor, got {}", v.dtype)
    if v.dim() != 1 or v.size(0) != columns:
        refuse(op, name + " must be [{}], got {}", columns, v.shape)


def columns_for(x: torch.Tensor, *vectors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """All in x's dtype or all in float32: as they are where that holds, else converted to float32."""
    dtype = x.dtype
    for v in vectors:
        if v is not None and v.dtype != dtype:
            break
    else:
        return vectors
    if all(v is None or v.dtype == torch.float32 for v in vectors):
        return vectors
    return tuple(None if v is None else v.to(torch.float32) for v in vectors)
