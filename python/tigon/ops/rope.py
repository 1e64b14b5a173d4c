"""Rotary position embedding (Su et al. 2021, eq. 34). Contract: ``csrc/tigon/ops/rope/rope.h``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tigon._dtensor import KERNEL_DTYPES
from tigon._op import Op, is_traced_or_transformed, once, raw
from tigon.error import Error, check, renamed
from tigon.ops import rope_tables as tables
from tigon.ops.arguments import check_booleans
from tigon.ops.in_place import check_apart, check_written

_CODES = {dtype: code for code, dtype in enumerate(KERNEL_DTYPES)}


def _reference(q, k, cos, sin, positions, form):
    c1, c2, s1, s2 = tables.turns(cos, sin, positions, form, q)
    dtype = q.dtype if form.keep_dtype else torch.promote_types(q.dtype, _real_dtype(cos, sin))
    y, z = (None if x is None else tables.rotate(x, c1, c2, s1, s2, form).to(dtype) for x in (q, k))
    return y if k is None else (y, z)


def reference(q, k, cos, sin=None, *, unsqueeze_dim=1, position_ids=None, inplace=False, **options):
    """The same formula in plain PyTorch operations (any float dtype, any device), never in place."""
    head_dim = tables.head_dim_of("rope", q, unsqueeze_dim)
    form = tables.Form.of("rope", head_dim, cos, tables.RopeOptions(**options))
    return _reference(q, k, cos, sin, position_ids, form)


def _real_dtype(cos, sin):
    return torch.promote_types(cos.dtype, sin.dtype) if sin is not None else cos.real.dtype


def _fake(q, k, cos, sin, positions, *options):
    dtype = q.dtype if tables.Form(*options).keep_dtype else torch.promote_types(q.dtype, cos.dtype)
    return tables.both_like(q, k, dtype)


def _fake_bwd(dq_out, dk_out, cos, sin, positions, *options):
    *_, code, q_swapped, k_swapped = options
    dtype = next(key for key, value in _CODES.items() if value == code)

    def one(dy, swapped):
        return cos.new_empty(0, dtype=dtype) if dy is None else tables.heads_like(dy, dtype, swapped)

    return one(dq_out, q_swapped), one(dk_out, k_swapped)


_bwd = raw("rope_bwd", _fake_bwd)
_in_place = raw("rope_in_place", lambda *args: None, "rope")


def _setup_context(ctx, inputs, output):
    q, k, cos, sin, positions, *options = inputs
    ctx.save_for_backward(cos, sin, positions)
    ctx.options = tuple(options)
    ctx.code, ctx.q_swapped = _CODES[q.dtype], tables.heads_swapped(q)
    ctx.k_swapped = k is not None and tables.heads_swapped(k)
    ctx.set_materialize_grads(False)
    fixed = [y for y, needed in zip(output, ctx.needs_input_grad, strict=False) if not needed]
    if fixed:
        ctx.mark_non_differentiable(*fixed)


def _backward(ctx, dq, dk=None):
    tables.check_constant("rope", *ctx.needs_input_grad[2:4])
    rest = (None,) * (3 + len(ctx.options))
    dq = dq if ctx.needs_input_grad[0] else None
    dk = dk if ctx.needs_input_grad[1] else None
    if dq is None and dk is None:
        return None, None, *rest
    dx = _bwd(dq, dk, *ctx.saved_tensors, *ctx.options, ctx.code, ctx.q_swapped, ctx.k_swapped)
    return None if dq is None else dx[0], None if dk is None else dx[1], *rest


_op = Op("rope", fake=_fake, setup_context=_setup_context, backward=_backward)


class _InPlace(torch.autograd.Function):
    """One tensor rotated in place: PyTorch lets a function of one result modify a view."""

    @staticmethod
    def forward(ctx, x, cos, sin, positions, *options):
        _in_place(x, None, cos, sin, positions, *options)
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin, positions)
        ctx.options, ctx.swapped = options, tables.heads_swapped(x)
        return x

    @staticmethod
    @once("rope")
    def backward(ctx, dy):
        code = _CODES[dy.dtype]
        dx, _ = _bwd(dy, None, *ctx.saved_tensors, *ctx.options, code, ctx.swapped, False)
        return dx, *(None,) * (3 + len(ctx.options))


def _check_in_place(q, k, form, dtype):
    check("rope", dtype == q.dtype, "inplace must keep {}, got a result of {}", q.dtype, dtype)
    check("rope", form.pairs != 2, "inplace must be False with deinterleave=True, got True")
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        dense = x.shape[-1] <= 1 or x.stride(-1) == 1
        words = "{} must have dense rows to be rotated in place, got strides {}"
        check("rope", dense, words, name, x.stride())
        check_written("rope", name, x)
        if x.requires_grad and torch.is_grad_enabled():
            check("rope", not x.is_leaf, "{} must not be a leaf that requires a gradient, got one", name)
    if k is not None:
        check_apart("rope", "k", k, "q", q)


def _rotate_in_place(q, k, cos, sin, positions, form):
    if is_traced_or_transformed():
        return _overwrite(q, k, _call(q, k, cos, sin, positions, form))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k)):
        for x in (q, k):
            if x is not None:
                _InPlace.apply(x, cos, sin, positions, *form)
    else:
        _in_place(q, k, cos, sin, positions, *form)
        torch.autograd.graph.increment_version(q if k is None else (q, k))  # whoever saved them is told
    return q if k is None else (q, k)


def _overwrite(q, k, y):
    return q.copy_(y) if k is None else (q.copy_(y[0]), k.copy_(y[1]))


def _call(q, k, cos, sin, positions, form):
    y = _op(q, k, cos, sin, positions, *form)
    return y[0] if k is None else y


def quick(q, k, cos, sin, unsqueeze_dim=1):
    """Both results of a call without options that needs no more checks than the operator's; None: it does."""
    if not tables.are_usual(q, k, cos, sin, unsqueeze_dim):
        return None
    return _op.quick(q, k, cos, sin, None, unsqueeze_dim, *tables.USUAL)


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    unsqueeze_dim: int = 1,
    interleaved: bool = False,
    deinterleave: bool = False,
    rotary_dim: int | None = None,
    tail: bool = False,
    position_ids: torch.Tensor | None = None,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
    keep_dtype: bool = False,
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of q and k in one pass: ``x * cos + rotate_half(x) * sin``.

    Args:
        q: ``[B, Hq, T, D]`` (``[B, T, Hq, D]`` with ``unsqueeze_dim=2``), or packed ``[T, Hq, D]``
            (``[Hq, T, D]`` with ``unsqueeze_dim=0``); float32, bfloat16 or float16, any strides of B, H and T
            (a strided last dimension is copied once). float64 runs the eager reference.
        k: as q, with its own number of heads; ``None``: only q, and one result.
        cos: ``[B, T, R]``, ``[1, T, R]`` or ``[T, R]`` with even R <= D, q's dtype or float32 (any other
            float dtype is converted): R columns of a head are rotated, each with its own column of cos and
            sin; the others are copied. Or complex ``[B, T, R/2]`` without ``sin`` (Llama 4's ``freqs_cis``):
            pair i is multiplied by number i. When cos or sin requires a gradient, the eager reference runs.
        sin: shape of cos.
        unsqueeze_dim: the dimension of q and k that holds the heads; negative ones count from the end.
        interleaved: pairs are columns 2i and 2i + 1 (Cohere, GLM, Llama 4), not i and i + R/2.
        deinterleave: with ``interleaved``, results lie in halves (DeepSeek), as columns of cos and sin do.
        rotary_dim: R, if cos and sin have R/2 columns: column i serves both of pair i. GLM, whose tables
            repeat themselves, is ``interleaved=True, rotary_dim=R`` with ``cos[..., : R // 2]``.
        tail: the last R columns are rotated, not the first.
        position_ids: int32 or int64 ``[B, T]``, ``[1, T]`` or ``[T]``: rows of tables ``[P, R]``. One outside
            them is refused on the CPU, and makes NaN on CUDA.
        mrope_section: M-RoPE, three numbers of pairs that add up to R/2: pairs of time, height and width take
            their cos and sin from tables ``[3, B, T, R]`` (``[3, 1, T, R]``, ``[3, T, R]``), or from the rows
            that ``position_ids`` ``[3, B, T]`` name.
        mrope_interleaved: the sections take turns (Qwen3-VL): pair 3j + 1 is height's, 3j + 2 width's, as
            long as they have any; all others are time's.
        keep_dtype: results in q's dtype if cos is wider (the arithmetic is float32 anyway).
        inplace: q and k are overwritten and returned, by the rules of PyTorch's in-place operations.

    Returns:
        The rotated q and k (only q without k) in ``promote(q, cos)``: new dense tensors, heads and tokens in
        the order q and k have them in memory. Differentiable in q and k; arithmetic in float32, rounded once
        (the plain formulation rounds three times in 16 bits); bitwise deterministic.

    Raises:
        tigon.Error: shape, dtype, device or an option does not fit.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", eq. 34; pairing
    of columns as in Hugging Face's ``apply_rotary_pos_emb``.
    """
    usual = rotary_dim is position_ids is mrope_section is None and keep_dtype is inplace is tail is False
    usual = usual and interleaved is deinterleave is mrope_interleaved is False
    y = quick(q, k, cos, sin, unsqueeze_dim) if usual else None
    if y is not None:
        return y[0] if k is None else y
    head_dim = tables.check_heads("rope", q, k, unsqueeze_dim)
    sections = mrope_section, mrope_interleaved
    options = tables.RopeOptions(interleaved, deinterleave, rotary_dim, tail, *sections, keep_dtype)
    form = tables.Form.of("rope", head_dim, cos, options)
    tables.check_tables("rope", q, cos, sin, position_ids, form)
    if inplace is not False:
        check_booleans("rope", inplace=inplace)
        dtype = q.dtype if keep_dtype else torch.promote_types(q.dtype, _real_dtype(cos, sin))
        _check_in_place(q, k, form, dtype)
    if tables.takes_reference("rope", q, k, cos, sin, position_ids):
        y = _reference(q, k, cos, sin, position_ids, form)
        return _overwrite(q, k, y) if inplace else y
    cos, sin = tables.kernel_tables("rope", q, cos, sin)
    run = _rotate_in_place if inplace else _call
    try:
        return run(q, k, cos, sin, position_ids, form)
    except Error as error:
        refused = renamed(error, "rope", {"positions": "position_ids"})
    raise refused
