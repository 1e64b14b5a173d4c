"""Sparsemax (Martins & Astudillo 2016). Contract: ``csrc/tigon/ops/sparsemax/sparsemax.h``."""

from __future__ import annotations

import torch

from tigon.ops.activation import activation


def reference(x):
    """The same formula in plain PyTorch operations (any float dtype, any device), tau by sorting."""
    if x.numel() == 0:
        return x * 1
    if x.dim() == 0:
        return reference(x.reshape(1)).reshape(())
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    z = z - z.detach().amax(-1, keepdim=True)
    ordered = z.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    place = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    size = (place * ordered > sums).sum(-1, keepdim=True).clamp_min(1)  # of the support; NaN is above nothing
    y = torch.relu(z - sums.gather(-1, size - 1) / size)
    return (y + 0 * y * y).to(x.dtype)  # a row of NaN has a gradient of NaN


@activation(reference, elementwise=False)
def sparsemax(x: torch.Tensor) -> torch.Tensor:
    """Sparsemax over the last dimension: the distribution that is nearest to x, ``max(x - tau, 0)``.

    Entries far below the largest are exactly 0, and tau is such that the others sum to 1.

    Args:
        x: ``[..., C]``, as in :func:`tigon.rms_norm`.

    Returns:
        ``[..., C]`` in x's dtype, contiguous. Differentiable (only the result is kept for the backward);
        arithmetic in float32, rounded once; bitwise deterministic. Entries of ``-inf`` give 0; a row of
        nothing else is NaN, and so is one that holds ``inf`` or NaN, with its gradient.

    Raises:
        tigon.Error: x is no float tensor.

    Source: Martins & Astudillo 2016, "From Softmax to Sparsemax: A Sparse Model of Attention and Multi-Label
    Classification", arXiv:1602.02068.
    """
