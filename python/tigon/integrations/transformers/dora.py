"""Lengths of the rows of ``W + scale * B A``, which DoRA scales."""

from __future__ import annotations

import torch


def blocks(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Some rows at a time: what PyTorch computes on the CPU in another dtype, it copies first."""
    return weight.split(64) if weight.is_cpu and not torch.compiler.is_compiling() else (weight,)


def row_lengths(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Lengths of the rows of ``weight + scale * b @ a``, float32. The sum is not formed.

    Constants to autograd, as DoRA has them.
    """
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        a, b = a.float(), b.float()
        lengths = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32) for rows in blocks(weight)]
        squares = torch.cat(lengths).square()
        cross = ((weight @ a.to(weight.dtype).t()).float() * b).sum(1)
        own = ((b @ (a @ a.t())) * b).sum(1)
        return (squares + 2 * scale * cross + scale**2 * own).clamp(min=0).sqrt()
