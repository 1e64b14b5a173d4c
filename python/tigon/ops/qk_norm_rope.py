"""RMSNorm of q and k by head, then rotary embedding. Contract: ``csrc/tigon/ops/rope/qk_norm_rope.h``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tigon._op import Op, raw
from tigon.error import check
from tigon.ops import rms_norm as _rms_norm
from tigon.ops import rope as _rope
from tigon.ops import rope_tables as tables
from tigon.ops.arguments import called, check_float, check_like, check_stored
from tigon.ops.columns import check_eps

MAX_HEAD_DIM = 1024  # of the kernels


def reference(q, k, q_weight, k_weight, cos, sin=None, eps=1e-6, *, offset=0.0, rounding="llama", **options):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    norm = {"eps": eps, "offset": offset, "rounding": rounding}
    q, dtype = _rms_norm.reference(q, q_weight, **norm), q.dtype
    k = None if k is None else _rms_norm.reference(k, k_weight, **norm)
    y = _rope.reference(q, k, cos, sin, **options)
    if not options.get("keep_dtype"):
        return y
    return y.to(dtype) if k is None else tuple(x.to(dtype) for x in y)


def _result_dtype(x, weight, rounding, cos, form):
    if form.keep_dtype:
        return x.dtype
    gemma = weight is None or rounding == _rms_norm.ROUNDINGS["gemma"]
    normed = x.dtype if gemma else torch.promote_types(x.dtype, weight.dtype)
    return torch.promote_types(normed, cos.dtype)


def _fake(q, k, q_weight, k_weight, cos, sin, positions, eps, offset, rounding, *options):
    dtype = _result_dtype(q, q_weight, rounding, cos, tables.Form(*options))
    return tables.both_like(q, k, dtype)


def _fake_bwd(dq_out, dk_out, q, k, q_weight, *rest):
    dq, dk = (
        q.new_empty(0) if dy is None else tables.heads_like(x, x.dtype, tables.heads_swapped(x))
        for dy, x in ((dq_out, q), (dk_out, k))
    )
    return dq, dk, q_weight.new_empty(2, *q_weight.shape) if rest[-1] else q.new_empty(0)


_bwd = raw("qk_norm_rope_bwd", _fake_bwd)


def _setup_context(ctx, inputs, output):
    *tensors, eps, offset, rounding = inputs[:10]
    ctx.save_for_backward(*tensors)
    ctx.options = (eps, offset, rounding, *inputs[10:])
    ctx.set_materialize_grads(False)
    needs = ctx.needs_input_grad
    constant = [y for i, y in enumerate(output[:2]) if inputs[i] is None or not (needs[i] or needs[i + 2])]
    ctx.mark_non_differentiable(*constant)


def _backward(ctx, dq, dk=None):
    tensors, needs = ctx.saved_tensors, ctx.needs_input_grad
    tables.check_constant("qk_norm_rope", *needs[4:6])
    rest = (None,) * (3 + len(ctx.options))
    dq = dq if needs[0] or needs[2] else None
    dk = dk if needs[1] or needs[3] else None
    if dq is None and dk is None:
        return None, None, None, None, *rest
    need_dweight = needs[2] or needs[3]
    dx, dz, dweight = _bwd(dq, dk, *tensors, *ctx.options, need_dweight)
    gradients = (None if dq is None else dx, None if dk is None else dz)
    gradients += tuple(dweight) if need_dweight else (None, None)
    return *(x if needed else None for x, needed in zip(gradients, needs, strict=False)), *rest


_op = Op("qk_norm_rope", fake=_fake, setup_context=_setup_context, backward=_backward)


def _check_weights(q, k, q_weight, k_weight):
    for name, x, w in (("q_weight", q, q_weight), ("k_weight", k, k_weight)):
        check("qk_norm_rope", w is None or x is not None, "{} must be None without its tensor, got one", name)
        if w is None:
            continue
        check_float("qk_norm_rope", name, w)
        check_like("qk_norm_rope", name, w, x.shape[-1:], q.device)
    both = k is None or (q_weight is None) == (k_weight is None)
    check("qk_norm_rope", both, "k_weight must be given exactly when q_weight is")
    same = q_weight is None or k_weight is None or q_weight.dtype == k_weight.dtype
    if not same:
        check("qk_norm_rope", False, "k_weight must be {}, got {}", q_weight.dtype, k_weight.dtype)


@called({"positions": "position_ids"}, stored=False)
def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "llama",
    unsqueeze_dim: int = 1,
    position_ids: torch.Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    tail: bool = False,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
    keep_dtype: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over every head of q and of k, then rotary embedding: one pass each way.

    ``rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin)``, as Qwen3 (``rounding="llama"``) and
    Gemma 3 (``rounding="gemma", offset=1``) have it.

    Args:
        q: ``[B, Hq, T, D]``, ``[B, T, Hq, D]`` or packed, as :func:`tigon.rope` takes it, D <= 1024.
        k: as q with its own number of heads; ``None``: only q, and one result.
        q_weight: ``[D]`` or ``None``; q's dtype or float32 (any other float dtype is converted).
        k_weight: ``[D]`` in q_weight's dtype; there exactly when q_weight is.
        eps, offset, rounding: of the norms, as in :func:`tigon.rms_norm`; the rotation rounds once more.
        cos, sin, unsqueeze_dim, interleaved, rotary_dim, tail, position_ids, mrope_section,
            mrope_interleaved: as in :func:`tigon.rope`.
        keep_dtype: results in q's dtype if weights or cos are wider.

    Returns:
        q and k (only q without k), normalised and rotated: new dense tensors, heads and tokens in the order
        q and k have them in memory. Differentiable in q, k and the weights; nothing is saved but the inputs;
        bitwise deterministic.

    Raises:
        tigon.Error: shape, dtype, device or an option does not fit.

    Source: Zhang & Sennrich 2019, eq. 4; Su et al. 2021, eq. 34; Dehghani et al. 2023 normalise q and k.
    """
    op = "qk_norm_rope"
    usual = rotary_dim is position_ids is mrope_section is None
    usual = usual and interleaved is tail is mrope_interleaved is keep_dtype is False
    usual = usual and (k_weight is None if k is None else (q_weight is None) is (k_weight is None))
    usual = usual and _rms_norm.are_usual(eps, offset, rounding)
    if usual and tables.are_usual(q, k, cos, sin, unsqueeze_dim):
        form = eps, offset, _rms_norm.ROUNDINGS[rounding], unsqueeze_dim, *tables.USUAL
        y = _op.quick(q, k, q_weight, k_weight, cos, sin, None, *form)
        if y is not None:
            return y[0] if k is None else y
    sections = mrope_section, mrope_interleaved
    options = tables.RopeOptions(interleaved, False, rotary_dim, tail, *sections, keep_dtype)
    _rms_norm.check_rounding(op, offset, rounding)
    check_eps(op, eps)
    head_dim = tables.check_heads(op, q, k, unsqueeze_dim)
    check(op, q.shape[-1] >= 1, "q must have at least one column, got 0")
    form = tables.Form.of(op, head_dim, cos, options)
    tables.check_tables(op, q, cos, sin, position_ids, form)
    _check_weights(q, k, q_weight, k_weight)
    fits = q.shape[-1] <= MAX_HEAD_DIM
    if tables.takes_reference(op, q, k, cos, sin, position_ids, q_weight, k_weight, fits=fits):
        return reference(
            q,
            k,
            q_weight,
            k_weight,
            cos,
            sin,
            eps,
            offset=offset,
            rounding=rounding,
            unsqueeze_dim=unsqueeze_dim,
            position_ids=position_ids,
            **options._asdict(),
        )
    cos, sin = tables.kernel_tables(op, q, cos, sin)
    if q_weight is not None and q_weight.dtype not in (q.dtype, torch.float32):
        wide = torch.promote_types(q.dtype, q_weight.dtype)
        check_stored(op, "q_weight", q_weight)
        if k is not None:
            check_stored(op, "k_weight", k_weight)
        q_weight, k_weight = q_weight.to(wide), None if k is None else k_weight.to(wide)
    rounding = _rms_norm.ROUNDINGS[rounding]
    y = _op(q, k, q_weight, k_weight, cos, sin, position_ids, eps, offset, rounding, *form)
    return y[0] if k is None else y
