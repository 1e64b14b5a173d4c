"""Checks of the arguments of norms: rows, and vectors by column (weight and bias)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tigon.error import refuse
from tigon.ops.arguments import check_float, check_integers, check_numbers, check_stored


def check_eps(op: str, eps: float) -> None:
    """eps must be a number, not negative."""
    if not isinstance(eps, float):
        check_numbers(op, eps=eps)
    if not eps >= 0:
        refuse(op, "eps must be >= 0, got {}", eps)


def normalized_size(op: str, size: int | Sequence[int]) -> int:
    """The number of columns of a norm; torch's modules take it as a sequence of one too."""
    if isinstance(size, Sequence) and len(size) == 1:
        (size,) = size
    if not isinstance(size, int) or isinstance(size, bool):
        refuse(op, "hidden_size must be an int, or a sequence of one, got {!r}", size)
    check_integers(op, least=1, hidden_size=size)
    return size


def check_types(op: str, x: torch.Tensor, eps: float = 0.0, **vectors: torch.Tensor | None) -> None:
    """Check what the core does not see: x and the given vectors must be float, eps a number."""
    check_float(op, "x", x)
    if not isinstance(eps, float):
        check_numbers(op, eps=eps)
    for name, v in vectors.items():
        if v is not None:
            check_float(op, name, v)


def check_sizes(
    op: str,
    x: torch.Tensor,
    eps: float = 0.0,
    *,
    name: str = "x",
    dim: int = -1,
    **vectors: torch.Tensor | None,
) -> None:
    """Check what the core refuses, for calls that only the reference gets: sizes and eps."""
    if x.dim() == 0:
        refuse(op, name + " must have at least one dimension, got 0")
    if dim == -1 and x.shape[-1] == 0:
        refuse(op, name + " must have at least one column, got 0")
    check_eps(op, eps)
    for key, v in vectors.items():
        if v is not None and v.device != x.device:
            refuse(op, key + " must be on {}, got {}", x.device, v.device)
        if v is not None and v.shape != x.shape[dim : dim + 1 or None]:
            refuse(op, key + " must be {}, got {}", x.shape[dim : dim + 1 or None], v.shape)


def columns_for(
    op: str, names: tuple[str, ...], x: torch.Tensor, *vectors: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The vectors in one dtype, x's or float32: unchanged if they have one, else converted to float32."""
    dtype = x.dtype
    for v in vectors:
        if v is not None and v.dtype != dtype:
            break
    else:
        return vectors
    if all(v is None or v.dtype == torch.float32 for v in vectors):
        return vectors
    for name, v in zip(names, vectors, strict=True):
        if v is not None:
            check_stored(op, name, v)
    return tuple(None if v is None else v.to(torch.float32) for v in vectors)
