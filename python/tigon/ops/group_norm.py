"""GroupNorm (Wu & He 2018). Contract: ``csrc/tigon/ops/group_norm/group_norm.h``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tigon._op import has_kernel, paired
from tigon.error import check
from tigon.ops.arguments import check_integers
from tigon.ops.columns import check_sizes, check_types, columns_for


def reference(x, groups, weight=None, bias=None, eps=1e-5):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if x.numel() != 0:
        y = F.group_norm(y, groups, None, None, eps)
    # F.group_norm gives no gradient to a bias without a weight, and NaN to the weight of no elements.
    weight, bias = (None if v is None else v.to(wide).view(-1, *(1,) * (x.dim() - 2)) for v in (weight, bias))
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _fake(x, weight, bias, channels, groups, eps):
    return x.new_empty(x.shape), x.new_empty((2, x.shape[0] * groups), dtype=torch.float32)


_op = paired("group_norm", _fake, results=1)


def check_groups(op, name, groups, channels) -> None:
    """Check that the number of groups divides the number of channels."""
    check_integers(op, **{name: groups})
    divides = groups > 0 and channels > 0 and channels % groups == 0
    check(op, divides, "{} must divide {}, got {}", name, channels, groups)


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Group normalisation: each group of channels of a sample by its own mean and variance.

    Args:
        x: ``[N, C, ...]`` float32, bfloat16 or float16; samples may lie apart in memory, any other layout is
            copied once. float64 runs the eager reference, whose gradients depend on the number of threads.
        groups: a divisor of C.
        weight, bias: ``[C]`` or ``None``; x's dtype or float32 (else, or if they differ, taken as float32).
        eps: added to the variance, >= 0.

    Returns:
        x's shape and dtype, contiguous, rounded once, as :func:`torch.nn.functional.group_norm`.
        Differentiable in x, weight and bias; accumulation in float32, the variance about the mean; bitwise
        deterministic.

    Raises:
        tigon.Error: shape, dtype, device, groups or eps does not fit.

    Source: Wu & He 2018, "Group Normalization", eq. 1 and 6.
    """
    op = "group_norm"
    check_types(op, x, eps)
    check(op, x.dim() >= 2, "x must have at least two dimensions, got {}", x.dim())
    samples, channels = x.shape[:2]
    check_groups(op, "groups", groups, channels)
    check_types(op, x, weight=weight, bias=bias)
    if not has_kernel(op, x=x, weight=weight, bias=bias) or x.numel() == 0:
        check_sizes(op, x, eps, dim=1, weight=weight, bias=bias)
        return reference(x, groups, weight, bias, eps)
    weight, bias = columns_for(op, ("weight", "bias"), x, weight, bias)
    rows = x.reshape(samples, channels * math.prod(x.shape[2:]))
    return _op(rows, weight, bias, channels, groups, eps).view(x.shape)
