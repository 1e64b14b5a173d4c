"""Attention residuals. Contract: ``csrc/tigon/ops/attention_residual/attention_residual.h``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tigon._op import has_kernel, paired
from tigon.error import check
from tigon.ops.arguments import check_float, check_numbers, check_stored, kind_of
from tigon.ops.columns import check_sizes, columns_for

_OP = "attention_residual"
_MOST_VALUES = 1024


def reference(values, query, norm_weight, eps=1e-6):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    wide = values if values.dtype == torch.float64 else values.float()
    h = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    alpha = (h * (query.to(h.dtype) * norm_weight.to(h.dtype))).sum(-1).softmax(0)
    return (alpha[..., None] * wide).sum(0).to(values.dtype)


def _fake(values, query, norm_weight, eps):
    return values.new_empty(values.shape[1:])


_op = paired(_OP, _fake)


def attention_residual(
    values: torch.Tensor | Sequence[torch.Tensor],
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Attention over the outputs of earlier blocks, in the place of their sum.

    ``alpha = softmax over n of query . rms_norm(values[n], norm_weight)``; the result is the sum over n of
    ``alpha_n * values[n]``.

    Args:
        values: ``[N, ..., D]`` float32, bfloat16 or float16, N from 1 to 1024, any leading strides (rows
            dense, or copied once); or N tensors ``[..., D]``, which are stacked first: one copy. float64
            runs the eager reference.
        query: ``[D]``, the learned query of this layer.
        norm_weight: ``[D]``, the weight of the norm of the values as keys.
        eps: added to the mean square, >= 0.

    Query and norm_weight are both of values' dtype or both float32; any other mixture is converted to
    float32.

    Returns:
        ``[..., D]``, contiguous, in values' dtype. Differentiable in values, query and norm_weight, of which
        nothing else is saved; arithmetic in float32, every result rounded once; bitwise deterministic.

    Raises:
        tigon.Error: shape, dtype, device or eps does not fit.

    Source: Kimi Team 2026, "Attention Residuals", arXiv:2603.15031.
    """
    if not isinstance(values, torch.Tensor):
        values = _stacked(values)
    check_float(_OP, "values", values)
    check_numbers(_OP, eps=eps)
    check_float(_OP, "query", query)
    check_float(_OP, "norm_weight", norm_weight)
    dims = values.dim()
    check(_OP, dims >= 2, "values must have at least two dimensions, got {}", dims)
    count = values.shape[0]
    check(_OP, 1 <= count <= _MOST_VALUES, "values must be 1 to {}, got {}", _MOST_VALUES, count)
    if not has_kernel(_OP, values=values, query=query, norm_weight=norm_weight):
        check_sizes(_OP, values, eps, name="values", query=query, norm_weight=norm_weight)
        return reference(values, query, norm_weight, eps)
    query, norm_weight = columns_for(_OP, ("query", "norm_weight"), values, query, norm_weight)
    return _op(values, query, norm_weight, eps)


def _stacked(values) -> torch.Tensor:
    """A list of values as one tensor."""
    given = isinstance(values, (list, tuple)) and len(values) > 0
    given = given and all(isinstance(value, torch.Tensor) for value in values)
    check(_OP, given, "values must be a float tensor, or a list of them, got {}", kind_of(values))
    for i, value in enumerate(values):
        check_float(_OP, f"values[{i}]", value)
        check_stored(_OP, f"values[{i}]", value)
        for what in ("shape", "dtype", "device"):
            expected, got = getattr(values[0], what), getattr(value, what)
            check(_OP, got == expected, "values must have one " + what + ", {}, got {}", expected, got)
    return torch.stack(tuple(values))
