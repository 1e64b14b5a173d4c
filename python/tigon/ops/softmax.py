"""Softmax (Bridle 1990). Contract: ``csrc/tigon/ops/softmax/softmax.h``."""

from __future__ import annotations

import torch

from tigon.ops.activation import activation


def reference(x):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    return torch.softmax(x, -1, torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


@activation(reference, elementwise=False)
def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, ``exp(x) / sum(exp(x))``.

    Args:
        x: ``[..., C]``, as in :func:`tigon.rms_norm`.

    Returns:
        ``[..., C]`` in x's dtype, contiguous. Differentiable (the result is kept for the backward);
        arithmetic in float32, rounded once; bitwise deterministic. Entries of ``-inf`` give 0; a row of
        no other row is NaN. In 16 bits the backward starts from the rounded result, as that of
        :func:`torch.softmax` in that dtype: of sharp rows it may keep no digit (float16, logits of size 100:
        off by 1.7e-4 at 1.1e-4), where a softmax in float32 that is rounded afterwards keeps them all.

    Raises:
        tigon.Error: x is no float tensor.

    Source: Bridle 1990, "Probabilistic interpretation of feedforward classification network outputs".
    """
