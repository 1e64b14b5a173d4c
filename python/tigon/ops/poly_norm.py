"""PolyNorm (Zhuo et al. 2024, eq. 4). Contract: ``csrc/tigon/ops/poly_norm/poly_norm.h``."""

from __future__ import annotations

import torch

from tigon._dtensor import Layout
from tigon._op import has_kernel, paired
from tigon.error import refuse
from tigon.ops.arguments import check_float
from tigon.ops.columns import check_sizes, check_types, columns_for


def reference(x, weight, bias, eps=1e-6):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    w, b, x1 = weight.to(wide), bias.to(wide), x.to(wide)

    def normalised(u):
        return u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)

    y = w[0] * normalised(x1 * x1 * x1) + w[1] * normalised(x1 * x1) + w[2] * normalised(x1) + b
    return y.to(x.dtype)


def _fake(x, weight, bias, eps):
    return x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1] * 3, dtype=torch.float32)


def _fake_bwd(dy, x, weight, rstd, need_dx, need_dweight, need_dbias):
    dx = x.new_empty(x.shape if need_dx else (0,))
    return dx, weight.new_empty(3 if need_dweight else 0), weight.new_empty(1 if need_dbias else 0)


_op = paired("poly_norm", _fake, results=1, layout=Layout(rows=1, columns=2), fake_bwd=_fake_bwd)


def poly_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """PolyNorm, an activation: weighted powers of x, each normalised over the last dimension.

    ``weight[0] * n(x^3) + weight[1] * n(x^2) + weight[2] * n(x) + bias`` with
    ``n(u) = u * rsqrt(mean(u^2) + eps)``

    Args:
        x: ``[..., C]``, as in :func:`tigon.rms_norm`.
        weight: ``[3]``, of x^3, x^2 and x.
        bias: ``[1]``. Both are of x's dtype or float32; of different dtypes, or of another one, both are
            taken as float32.
        eps: added to the mean squares, >= 0.

    Returns:
        ``[..., C]`` in x's dtype, contiguous, rounded once. Differentiable in x, weight and bias (x and three
        float32 a row are kept); powers, sums and gradients in float32: a row whose sum of x^6 overflows
        (entries of 6e5 in 4096 columns) is left without its cubes; bitwise deterministic.

    Raises:
        tigon.Error: shape, dtype, device or eps does not fit.

    Source: Zhuo et al. 2024, "Polynomial Composition Activations: Unleashing the Dynamics of Large Language
    Models", arXiv:2411.03884.
    """
    check_types("poly_norm", x, eps)
    check_float("poly_norm", "weight", weight)
    check_float("poly_norm", "bias", bias)
    if not has_kernel("poly_norm", x=x, weight=weight, bias=bias):
        check_sizes("poly_norm", x, eps)
        for name, v, size in (("weight", weight, 3), ("bias", bias, 1)):
            if v.shape != (size,):
                refuse("poly_norm", name + " must be [{}], got {}", size, v.shape)
        return reference(x, weight, bias, eps)
    return _op(x, *columns_for("poly_norm", ("weight", "bias"), x, weight, bias), eps)
