"""Residual addition and RMSNorm in one pass. Contract: ``csrc/tigon/ops/add_rms_norm/add_rms_norm.h``."""

from __future__ import annotations

import torch

from tigon._dtensor import Layout
from tigon._op import Op, has_kernel, is_traced_or_transformed, once, raw
from tigon.error import refuse
from tigon.ops import rms_norm as norm
from tigon.ops.arguments import check_booleans, check_float, of_one_shape
from tigon.ops.columns import check_sizes, columns_for
from tigon.ops.in_place import check_apart, check_written


def reference(x, residual, weight=None, eps=1e-6, *, offset=0.0, rounding="llama"):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    h = x + residual
    return norm.reference(h, weight, eps, offset=offset, rounding=rounding), h


def _fake(x, residual, weight, eps, offset, rounding):
    y = x.new_empty(x.shape, dtype=norm.result_dtype(x, weight, rounding))
    return y, x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


def _fake_in_place(*args):
    y, _, rstd = _fake(*args)
    return y, rstd


def _fake_bwd(dy, dh, h, weight, rstd, offset, rounding, need_dx, need_dweight):
    dx = h.new_empty(h.shape if need_dx else (0,))
    return dx, weight.new_empty(weight.shape) if need_dweight else h.new_empty(0)


_bwd = raw("add_rms_norm_bwd", _fake_bwd)
_in_place = raw("add_rms_norm_in_place", _fake_in_place, "add_rms_norm")


def _setup_context(ctx, inputs, output):
    _, _, weight, _, ctx.offset, ctx.rounding = inputs
    _, h, rstd = output
    ctx.save_for_backward(h, weight, rstd)
    ctx.set_materialize_grads(False)
    if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
        ctx.mark_non_differentiable(h, rstd)


def _backward(ctx, dy, dh, _=None):
    need_dx = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
    dx = dweight = None
    if dy is None:
        dx = dh
    else:
        h, weight, rstd = ctx.saved_tensors
        need_dweight = weight is not None and ctx.needs_input_grad[2]
        results = _bwd(dy, dh, h, weight, rstd, ctx.offset, ctx.rounding, need_dx, need_dweight)
        dx, dweight = results[0] if need_dx else None, results[1] if need_dweight else None
    first, second = (dx if need else None for need in ctx.needs_input_grad[:2])
    return first, second, dweight, None, None, None


_layout = Layout(rows=2, columns=1)
_op = Op(
    "add_rms_norm",
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    results=2,
    layout=_layout,
    fp8=lambda inputs: inputs[2],
)


class _InPlace(torch.autograd.Function):
    """The sum takes the residual's place."""

    @staticmethod
    def forward(ctx, x, residual, *options):
        y, rstd = _in_place(x, residual, *options)
        ctx.mark_dirty(residual)
        _setup_context(ctx, (x, residual, *options), (y, residual, rstd))
        return y, residual

    backward = staticmethod(once("add_rms_norm")(_backward))


def _add_in_place(x, residual, *options):
    if is_traced_or_transformed():
        y, h = _op(x, residual, *options)
        return y, residual.copy_(h)
    inputs = (x, residual, *options)
    if torch.is_grad_enabled() and any(torch.is_tensor(a) and a.requires_grad for a in inputs):
        return _InPlace.apply(x, residual, *options)
    y, _ = _in_place(x, residual, *options)
    torch.autograd.graph.increment_version(residual)  # whoever saved it is told
    return y, residual


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "llama",
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual addition followed by RMSNorm over the last dimension, in one pass.

    ``h = x + residual; y = rms_norm(h, weight, eps)``

    Args:
        x, weight, eps, offset, rounding: as in :func:`tigon.rms_norm`.
        residual: x's shape, dtype and device.
        inplace: the sum takes the residual's place: no memory for it, and ``residual`` is what is returned as
            ``h``. Autograd's rules for in-place operations hold. Needs dense rows, every element of which is
            there once, and x in the same memory or in none of it.

    Returns:
        ``(y, h)``: the normalised sum and the sum, rounded to x's dtype as ``x + residual`` is, which goes on
        as the next residual. Differentiable in x, residual and weight, through both results in one pass.

    Raises:
        tigon.Error: shape, dtype, device or eps does not fit.

    Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
    """
    op = "add_rms_norm"
    if of_one_shape(x, residual) and inplace is False and norm.are_usual(eps, offset, rounding):
        results = _op.quick(x, residual, weight, eps, offset, norm.ROUNDINGS[rounding])
        if results is not None:
            return results
    norm.check_options(op, x, weight, eps, offset, rounding)
    check_float(op, "residual", residual)
    if residual.shape != x.shape:
        refuse(op, "residual must be {}, got {}", x.shape, residual.shape)
    if residual.dtype != x.dtype:
        refuse(op, "residual must be {}, got {}", x.dtype, residual.dtype)
    if inplace is not False:
        check_booleans(op, inplace=inplace)
        check_written(op, "residual", residual)
        check_apart(op, "residual", residual, "x", x, or_same=True)
    if not has_kernel(op, x=x, residual=residual, weight=weight):
        check_sizes(op, x, eps, weight=weight)
        y, h = reference(x, residual, weight, eps, offset=offset, rounding=rounding)
        return (y, residual.copy_(h)) if inplace else (y, h)
    (weight,) = columns_for(op, ("weight",), x, weight)
    options = (weight, eps, offset, norm.ROUNDINGS[rounding])
    return _add_in_place(x, residual, *options) if inplace else _op(x, residual, *options)
