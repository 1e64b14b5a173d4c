"""LayerNorm (Ba, Kiros & Hinton 2016, eq. 4). Contract: ``csrc/tigon/ops/layer_norm/layer_norm.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon._dtensor import Layout
from tigon._op import has_kernel, paired
from tigon.ops.columns import check_sizes, check_types, columns_for


def reference(x, weight=None, bias=None, eps=1e-5):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    wide = x if x.dtype == torch.float64 else x.float()
    weight, bias = (None if v is None else v.to(wide.dtype) for v in (weight, bias))
    return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)


def _fake(x, weight, bias, eps):
    return x.new_empty(x.shape), x.new_empty((2, x.numel() // x.shape[-1]), dtype=torch.float32)


_op = paired("layer_norm", _fake, results=1, layout=Layout(rows=1, columns=2))


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Layer normalisation over the last dimension.

    ``(x - mean(x)) * rsqrt(var(x) + eps) * weight + bias``

    Args:
        x: ``[..., C]``, as in :func:`tigon.rms_norm`. The reference's gradients depend on the number of
            threads.
        weight: ``[C]`` or ``None``; x's dtype or float32 (any other float dtype is converted).
        bias: ``[C]`` or ``None``; likewise. Of different dtypes, both are taken as float32.
        eps: added to the variance, >= 0.

    Returns:
        ``[..., C]`` in x's dtype, contiguous, rounded once, as :func:`torch.nn.functional.layer_norm`.
        Differentiable in x, weight and bias; accumulation in float32, the variance about the mean; bitwise
        deterministic.

    Raises:
        tigon.Error: shape, dtype, device or eps does not fit.

    Source: Ba, Kiros & Hinton 2016, "Layer Normalization", eq. 4.
    """
    check_types("layer_norm", x, eps, weight=weight, bias=bias)
    if not has_kernel("layer_norm", x=x, weight=weight, bias=bias):
        check_sizes("layer_norm", x, eps, weight=weight, bias=bias)
        return reference(x, weight, bias, eps)
    weight, bias = columns_for("layer_norm", ("weight", "bias"), x, weight, bias)
    return _op(x, weight, bias, eps)
