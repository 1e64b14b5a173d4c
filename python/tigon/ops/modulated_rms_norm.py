"""RMSNorm with modulation. Contract: ``csrc/tigon/ops/modulated_rms_norm/modulated_rms_norm.h``."""

from __future__ import annotations

import torch

from tigon._op import has_kernel, paired
from tigon.error import check, refuse
from tigon.ops import rms_norm as norm
from tigon.ops.arguments import check_float
from tigon.ops.columns import check_sizes, columns_for

_OP = "modulated_rms_norm"


def reference(x, weight, scale, shift=None, eps=1e-6, *, offset=0.0, rounding="llama"):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    wide = x if x.dtype == torch.float64 else x.float()
    h = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if rounding == "llama":
        h = h.to(x.dtype).to(wide.dtype)
    if weight is not None:
        h = h * (offset + weight.to(wide.dtype))
    y = h * (1 + _by_row(scale, x).to(wide.dtype))
    if shift is not None:
        y = y + _by_row(shift, x).to(wide.dtype)
    return y.to(x.dtype)


def _by_row(modulation, x):
    """A modulation as it meets each row of x."""
    rows = modulation.reshape(-1, x.shape[-1])
    share = x.numel() // x.shape[-1] // max(rows.shape[0], 1)
    return rows.repeat_interleave(share, 0).reshape(x.shape)


def _fake(x, weight, scale, shift, eps, offset, rounding):
    return x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


def _fake_bwd(dy, x, weight, scale, rstd, offset, rounding, need_dx, need_dweight, need_dscale, need_dshift):
    return (
        x.new_empty(x.shape if need_dx else (0,)),
        weight.new_empty(weight.shape) if need_dweight else x.new_empty(0),
        scale.new_empty(scale.shape if need_dscale else (0,)),
        scale.new_empty(scale.shape if need_dshift else (0,)),
    )


_op = paired(_OP, _fake, results=1, fake_bwd=_fake_bwd)


def _check_modulation(name, modulation, x):
    """Its last dimension is x's, and its rows divide x's as the shapes say."""
    check_float(_OP, name, modulation)
    shape, of = modulation.shape, x.shape
    if modulation.dim() == 0 or shape[-1] != of[-1]:
        refuse(_OP, name + " must be [..., {}], got {}", of[-1], shape)
    if 2 < x.dim() == modulation.dim():
        shared = next((i for i, (m, n) in enumerate(zip(shape, of, strict=True)) if m != n), len(of))
        fits = all(n == 1 for n in shape[shared:-1])
        check(_OP, fits, name + " must have x's leading sizes, then ones, for x {}, got {}", of, shape)
    rows, groups = x.numel() // of[-1], modulation.numel() // of[-1]
    fits = rows % groups == 0 if groups else rows == 0
    check(_OP, fits, name + " must have a number of rows that divides {}, got {}", rows, groups)


def modulated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "llama",
) -> torch.Tensor:
    """RMSNorm over the last dimension and the modulation of adaptive norms (AdaLN, DiT), in one pass.

    ``rms_norm(x, weight) * (1 + scale) + shift``

    Args:
        x, weight, eps, offset: as in :func:`tigon.rms_norm`.
        scale: ``[C]``, ``[1, C]``, ``[B, C]`` or ``[B, 1, C]`` for x ``[B, T, C]``, or a row per row of x: as
            many adjacent rows of x share a row of scale as there are times more of them. Any row stride
            (a chunk of a wider projection is not copied).
        shift: as many rows as scale, or ``None``.
        rounding: ``"llama"`` rounds the normalised x to its dtype before the weight, and the result;
            ``"gemma"`` and ``"none"`` round only the result.

    Weight, scale and shift are all of x's dtype or all float32; any other mixture is converted to float32.

    Returns:
        ``[..., C]``, contiguous, in x's dtype. Differentiable in x, weight, scale and shift; accumulation in
        float32, gradients summed over rows in fixed order and rounded once; bitwise deterministic.

    Raises:
        tigon.Error: shape, dtype, device or an option does not fit.

    Source: Peebles & Xie 2023, "Scalable Diffusion Models with Transformers", section 3.2; Zhang & Sennrich
    2019, eq. 4.
    """
    norm.check_options(_OP, x, weight, eps, offset, rounding)
    if x.dim() == 0:
        refuse(_OP, "x must have at least one dimension, got 0")
    if x.shape[-1] == 0:
        refuse(_OP, "x must have at least one column, got 0")
    _check_modulation("scale", scale, x)
    if shift is not None:
        _check_modulation("shift", shift, x)
        fits = shift.numel() == scale.numel()
        check(_OP, fits, "shift must have as many rows as scale, {}, got {}", scale.shape, shift.shape)
    if not has_kernel(_OP, x=x, weight=weight, scale=scale, shift=shift):
        check_sizes(_OP, x, eps, weight=weight)
        return reference(x, weight, scale, shift, eps, offset=offset, rounding=rounding)
    weight, scale, shift = columns_for(_OP, ("weight", "scale", "shift"), x, weight, scale, shift)
    shift = None if shift is None else shift.reshape(scale.shape)
    return _op(x, weight, scale, shift, eps, offset, norm.ROUNDINGS[rounding])
