"""Vectors by column, as the norms take them: weight and bias."""

from __future__ import annotations

import torch

from tigon.error import check


def check_columns(op: str, columns: int, **vectors: torch.Tensor | None) -> None:
    """Every vector that is there must be float and of that length."""
    for name, v in vectors.items():
        if v is None:
            continue
        check(op, v.is_floating_point(), name + " must be a float tensor, got {}", v.dtype)
        fits = v.dim() == 1 and v.shape[0] == columns
        check(op, fits, name + " must be [{}], got {}", columns, v.shape)


def columns_for(x: torch.Tensor, *vectors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """All in x's dtype or all in float32: as they are where that holds, else converted to float32."""
    dtypes = {v.dtype for v in vectors if v is not None}
    if len(dtypes) <= 1 and dtypes <= {x.dtype, torch.float32}:
        return vectors
    return tuple(None if v is None else v.to(torch.float32) for v in vectors)
