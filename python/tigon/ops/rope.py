"""Rotary position embedding (Su et al. 2021, eq. 34). Contract: ``tigon/ops/rope/rope.h``."""

from __future__ import annotations

import torch

from tigon._op import Op, has_kernel, raw
from tigon.error import Error

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # tigon::DType


def reference(q, k, cos, sin, *, unsqueeze_dim=1):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, cos.dtype), sin.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    half = cos.shape[-1] // 2
    c1, c2 = cos.to(wide).unsqueeze(unsqueeze_dim).tensor_split(2, dim=-1)
    s1, s2 = sin.to(wide).unsqueeze(unsqueeze_dim).tensor_split(2, dim=-1)

    def rotate(x):
        x1, x2, rest = x.to(wide).split((half, half, x.shape[-1] - 2 * half), dim=-1)
        return torch.cat((x1 * c1 - x2 * s1, x2 * c2 + x1 * s2, rest), dim=-1).to(dtype)

    return rotate(q), rotate(k)


def _like(x, dtype, swapped):
    """Dense, sizes of x; ``swapped``: dimension 1 lies inside dimension 2 in memory, as in x."""
    if not swapped:
        return x.new_empty(x.shape, dtype=dtype)
    batch, one, two, cols = x.shape
    width = max(cols, 1)
    inner = max(one, 1) * width
    strides = (max(two, 1) * inner, width, inner, 1)
    return torch.empty_strided((batch, one, two, cols), strides, dtype=dtype, device=x.device)


def _swapped(x):
    return bool(x.stride(1) < x.stride(2))


def _fake(q, k, cos, sin, unsqueeze_dim):
    dtype = torch.promote_types(q.dtype, cos.dtype)
    return _like(q, dtype, _swapped(q)), _like(k, dtype, _swapped(k))


def _fake_bwd(dq_out, dk_out, cos, sin, unsqueeze_dim, dtype, q_swapped, k_swapped):
    dtype = next(key for key, code in _CODES.items() if code == dtype)

    def one(dy, swapped):
        return cos.new_empty(0, dtype=dtype) if dy is None else _like(dy, dtype, swapped)

    return one(dq_out, q_swapped), one(dk_out, k_swapped)


_bwd = raw("rope_bwd", _fake_bwd)


def _setup_context(ctx, inputs, output):
    q, k, cos, sin, ctx.unsqueeze_dim = inputs
    ctx.save_for_backward(cos, sin)
    ctx.code, ctx.q_swapped, ctx.k_swapped = _CODES[q.dtype], _swapped(q), _swapped(k)
    ctx.set_materialize_grads(False)
    fixed = [y for y, needed in zip(output, ctx.needs_input_grad, strict=False) if not needed]
    if fixed:
        ctx.mark_non_differentiable(*fixed)


def _backward(ctx, dq, dk):
    dq = dq if ctx.needs_input_grad[0] else None
    dk = dk if ctx.needs_input_grad[1] else None
    if dq is None and dk is None:
        return None, None, None, None, None
    call = torch.ops.tigon.rope_bwd if torch.compiler.is_compiling() else _bwd
    cos, sin = ctx.saved_tensors
    dx = call(dq, dk, cos, sin, ctx.unsqueeze_dim, ctx.code, ctx.q_swapped, ctx.k_swapped)
    return None if dq is None else dx[0], None if dk is None else dx[1], None, None, None


_op = Op("rope", fake=_fake, setup_context=_setup_context, backward=_backward)


def _check(q, k, cos, sin, unsqueeze_dim):
    if unsqueeze_dim not in (1, 2):
        raise Error(f"[rope] unsqueeze_dim must be 1 or 2, got {unsqueeze_dim!r}")
    for name, x, dims in (("q", q, (4,)), ("k", k, (4,)), ("cos", cos, (2, 3)), ("sin", sin, (2, 3))):
        if not x.is_floating_point():
            raise Error(f"[rope] {name} must be a float tensor, got {x.dtype}")
        if x.dim() not in dims:
            raise Error(f"[rope] {name} must have {' or '.join(map(str, dims))} dimensions, got {x.dim()}")
        if x.device != q.device:
            raise Error(f"[rope] {name} must be on {q.device}, got {x.device}")
    if k.dtype != q.dtype:
        raise Error(f"[rope] k must be {q.dtype}, got {k.dtype}")
    shape, table = q.shape, cos.shape
    batch, tokens, cols = shape[0], shape[3 - unsqueeze_dim], shape[3]
    other = k.shape
    if (other[0], other[3 - unsqueeze_dim], other[3]) != (batch, tokens, cols):
        wanted = [batch, "H", tokens, cols] if unsqueeze_dim == 1 else [batch, tokens, "H", cols]
        raise Error(f"[rope] k must be [{', '.join(map(str, wanted))}], got {list(other)}")
    if table[-2] != tokens or (len(table) == 3 and table[0] not in (1, batch)):
        raise Error(f"[rope] cos must be [1 or {batch}, {tokens}, R] or [{tokens}, R], got {list(table)}")
    if table[-1] % 2 or table[-1] > cols:
        raise Error(f"[rope] cos must have an even number of columns, at most {cols}, got {table[-1]}")
    if sin.shape != table:
        raise Error(f"[rope] sin must be {list(table)}, got {list(sin.shape)}")


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of q and k in one pass: ``x * cos + rotate_half(x) * sin``.

    Args:
        q: ``[B, Hq, T, D]`` (``[B, T, Hq, D]`` with ``unsqueeze_dim=2``) float32, bfloat16 or float16, any
            strides of B, H and T (a strided last dimension is copied once). float64 runs the eager reference.
        k: ``[B, Hk, T, D]`` (``[B, T, Hk, D]``), dtype and device of q.
        cos: ``[B, T, R]``, ``[1, T, R]`` or ``[T, R]`` with even R <= D: the first R columns of a head are
            rotated (column i with i + R/2, each with its own half of cos and sin), the others copied. q's
            dtype or float32 (any other float dtype is converted). When cos or sin requires a gradient, the
            eager reference runs.
        sin: shape of cos.
        unsqueeze_dim: the dimension of q and k that holds the heads, 1 or 2.

    Returns:
        The rotated q and k in ``promote(q, cos)``: new dense tensors, heads and tokens in the order q and k
        have them in memory. Differentiable in q and k; arithmetic in float32, rounded once (the plain
        formulation rounds three times in 16 bits); bitwise deterministic.

    Raises:
        tigon.Error: shape, dtype, device or unsqueeze_dim does not fit.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", eq. 34; pairing
    of columns as in Hugging Face's ``apply_rotary_pos_emb``.
    """
    _check(q, k, cos, sin, unsqueeze_dim)
    wants_table_grad = (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled()
    if wants_table_grad or not has_kernel("rope", q, k, cos, sin):
        return reference(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    if cos.dtype != sin.dtype or cos.dtype not in (q.dtype, torch.float32):
        wide = torch.promote_types(torch.promote_types(q.dtype, cos.dtype), sin.dtype)
        cos, sin = cos.to(wide), sin.to(wide)
    return _op(q, k, cos, sin, unsqueeze_dim)
