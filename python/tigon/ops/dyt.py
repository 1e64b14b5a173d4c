"""Dynamic Tanh (Zhu et al. 2025, eq. 1). Contract: ``csrc/tigon/ops/dyt/dyt.h``."""

from __future__ import annotations

import torch

from tigon._dtensor import Layout
from tigon._op import has_kernel, paired
from tigon.error import check
from tigon.ops.arguments import check_float
from tigon.ops.columns import check_sizes, check_types, columns_for


def reference(x, alpha, weight=None, bias=None):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.tanh(alpha.to(wide).reshape(()) * x.to(wide))
    y = y if weight is None else y * weight.to(wide)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def _fake(x, alpha, weight, bias):
    return x.new_empty(x.shape)


def _fake_bwd(dy, x, alpha, weight, need_dx, need_dalpha, need_dweight, need_dbias):
    dx = x.new_empty(x.shape if need_dx else (0,))
    dalpha = alpha.new_empty(alpha.shape if need_dalpha else (0,))
    return dx, dalpha, *(alpha.new_empty(x.shape[-1] if n else 0) for n in (need_dweight, need_dbias))


_op = paired("dyt", _fake, layout=Layout(rows=1, columns=3), fake_bwd=_fake_bwd)


def dyt(
    x: torch.Tensor, alpha: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Dynamic Tanh, a layer in the place of a norm: ``tanh(alpha * x) * weight + bias``.

    Args:
        x: ``[..., C]``, as in :func:`tigon.rms_norm`.
        alpha: one element, any number of dimensions.
        weight, bias: ``[C]`` or ``None``. The three are of x's dtype or float32; of different dtypes, or of
            another one, all are taken as float32.

    Returns:
        ``[..., C]`` in x's dtype, contiguous, rounded once. Differentiable in x, alpha, weight and bias;
        accumulation in float32; bitwise deterministic.

    Raises:
        tigon.Error: shape, dtype or device does not fit.

    Source: Zhu et al. 2025, "Transformers without Normalization", eq. 1, arXiv:2503.10622.
    """
    check_types("dyt", x, weight=weight, bias=bias)
    check_float("dyt", "alpha", alpha)
    if not has_kernel("dyt", x=x, alpha=alpha, weight=weight, bias=bias):
        check_sizes("dyt", x, weight=weight, bias=bias)
        check("dyt", alpha.numel() == 1, "alpha must have one element, got {}", alpha.numel())
        return reference(x, alpha, weight, bias)
    return _op(x, *columns_for("dyt", ("alpha", "weight", "bias"), x, alpha, weight, bias))
