"""RMSNorm (Zhang & Sennrich 2019, eq. 4). Contract: ``csrc/tigon/ops/rms_norm/rms_norm.h``."""

from __future__ import annotations

import torch

from tigon._dtensor import Layout
from tigon._op import has_kernel, paired
from tigon.ops.arguments import check_choice, check_numbers
from tigon.ops.columns import check_sizes, check_types, columns_for

ROUNDINGS = {"llama": 0, "gemma": 1, "none": 2}


def reference(x, weight=None, eps=1e-6, *, offset=0.0, rounding="llama"):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    wide = x if x.dtype == torch.float64 else x.float()
    h = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if rounding == "llama":
        h = h.to(x.dtype)
        return h if weight is None else h * (offset + weight if offset else weight)
    if weight is None:
        return h.to(x.dtype)
    y = h * (offset + weight.to(h.dtype))
    return y.to(x.dtype if rounding == "gemma" else torch.promote_types(x.dtype, weight.dtype))


def check_options(op, x, weight, eps, offset, rounding):
    """Check what the core of every RMS norm does not see."""
    check_rounding(op, offset, rounding)
    check_types(op, x, eps, weight=weight)


def check_rounding(op, offset, rounding):
    """Check how an RMS norm uses its weight."""
    check_choice(op, "rounding", rounding, ROUNDINGS)
    if type(offset) is not float or offset != offset:
        check_numbers(op, offset=offset)


def are_usual(eps, offset, rounding) -> bool:
    """Whether numbers and rounding of a norm need none of the checks above."""
    usual = type(eps) is type(offset) is float and offset == offset
    return usual and type(rounding) is str and rounding in ROUNDINGS


def result_dtype(x, weight, rounding):
    """The dtype of y (rms_norm_result of the contract)."""
    gemma = rounding == ROUNDINGS["gemma"]
    return x.dtype if weight is None or gemma else torch.promote_types(x.dtype, weight.dtype)


def _fake(x, weight, eps, offset, rounding):
    y = x.new_empty(x.shape, dtype=result_dtype(x, weight, rounding))
    return y, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


_op = paired("rms_norm", _fake, results=1, layout=Layout(rows=1, columns=1), fp8=lambda inputs: inputs[1])


def column_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sums of ``a * b`` over all but the last dimension, float32: the weight's gradient if rstd is one."""
    columns = a.new_ones(a.shape[-1], dtype=torch.float32)
    rows = a.new_ones(a.numel() // a.shape[-1], dtype=torch.float32)
    return _op.bwd(a, b, columns, rows, 0.0, ROUNDINGS["gemma"], False, True)[1]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "llama",
) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension.

    ``x * rsqrt(mean(x^2) + eps) * (offset + weight)``

    Args:
        x: ``[..., C]`` float32, bfloat16 or float16, any leading strides (rows dense, or copied once).
            float64 runs the eager reference.
        weight: ``[C]`` or ``None``; x's dtype or float32 (any other float dtype is converted).
        eps: added to the mean square, >= 0.
        offset: added to the weight (Gemma: 1); without a weight it has no effect.
        rounding: ``"llama"`` rounds the normalised x to its dtype before the weight, result in
            ``promote(x, weight)``; ``"gemma"`` rounds once, result in x's dtype, as
            :func:`torch.nn.functional.rms_norm`; ``"none"`` rounds once, result in ``promote(x, weight)``.

    Returns:
        ``[..., C]``, contiguous. Differentiable in x and weight; accumulation in float32; bitwise
        deterministic.

    Raises:
        tigon.Error: shape, dtype, device or eps does not fit.

    Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
    """
    if are_usual(eps, offset, rounding):
        y = _op.quick(x, weight, eps, offset, ROUNDINGS[rounding])
        if y is not None:
            return y
    check_options("rms_norm", x, weight, eps, offset, rounding)
    if not has_kernel("rms_norm", x=x, weight=weight):
        check_sizes("rms_norm", x, eps, weight=weight)
        return reference(x, weight, eps, offset=offset, rounding=rounding)
    (weight,) = columns_for("rms_norm", ("weight",), x, weight)
    return _op(x, weight, eps, offset, ROUNDINGS[rounding])
