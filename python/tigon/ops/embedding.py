"""Embedding (Bengio et al. 2003). Contract: ``csrc/tigon/ops/embedding/embedding.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon._op import Op, has_kernel, raw
from tigon.error import check
from tigon.ops.arguments import (
    check_float,
    check_indices,
    check_integers,
    check_numbers,
    check_range,
    known_labels,
)

_OP = "embedding"


def reference(ids, weight, *, padding_idx=None, scale=1.0):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    ids, factor = known_labels(ids, 0, weight.shape[0])
    rows = F.embedding(ids, weight, padding_idx)
    if factor is not None:
        rows = torch.where(factor.isnan().unsqueeze(-1), torch.nan, rows)  # weight gets no gradient from them
    if scale == 1.0:
        return rows
    return (rows.to(torch.promote_types(rows.dtype, torch.float32)) * scale).to(rows.dtype)


def _fake(ids, weight, padding_idx, scale):
    return weight.new_empty((ids.shape[0], weight.shape[1]))


def _fake_bwd(dy, ids, vocabulary, padding_idx, scale):
    return dy.new_empty((vocabulary, dy.shape[-1]))


_bwd = raw("embedding_bwd", _fake_bwd)


def _setup_context(ctx, inputs, output):
    ids, weight, *ctx.options = inputs
    ctx.vocabulary = weight.shape[0]
    ctx.save_for_backward(ids)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy):
    if dy is None:
        return (None,) * 4
    (ids,) = ctx.saved_tensors
    return None, _bwd(dy, ids, ctx.vocabulary, *ctx.options), None, None


_op = Op(_OP, fake=_fake, setup_context=_setup_context, backward=_backward)


def check_padding(op, padding_idx, rows) -> None:
    """padding_idx must be a row of the table, from either end."""
    check_integers(op, padding_idx=padding_idx)
    fits = -rows <= padding_idx < rows
    check(op, fits, "padding_idx must be in [{}, {}), got {}", -rows, rows, padding_idx)


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, *, padding_idx: int | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Rows of a table, ``scale * weight[ids]``.

    Args:
        ids: any shape, int64 or int32, in ``[0, V)``.
        weight: ``[V, H]`` float32, bfloat16 or float16 (rows dense, or copied once). float64 runs the eager
            reference.
        padding_idx: the id whose row gets no gradient, in ``[-V, V)``, or ``None``. Its row is looked up as
            any other.
        scale: factor of the rows (Gemma's ``sqrt(H)``; models that round it to the weight's dtype pass it
            rounded).

    Returns:
        ``[*ids.shape, H]`` in weight's dtype, contiguous; rounded once, with ``scale=1`` not at all.
        Differentiable in weight: a dense gradient, every row's sum in float32 in the order of the positions,
        rounded once; bitwise deterministic, however often an id occurs.

    Raises:
        tigon.Error: shapes, dtypes, devices or padding_idx do not fit; on the CPU also an id outside
            ``[0, V)``. On CUDA the row of such an id is NaN and adds nothing to the gradient, without
            synchronisation.

    Source: Bengio et al. 2003, "A Neural Probabilistic Language Model".
    """
    check_indices(_OP, "ids", ids)
    check_float(_OP, "weight", weight)
    check_numbers(_OP, scale=scale)
    check(_OP, weight.dim() == 2, "weight must have two dimensions, got {}", weight.dim())
    rows = weight.shape[0]
    if padding_idx is not None:
        check_padding(_OP, padding_idx, rows)
        padding_idx %= rows
    if not has_kernel(_OP, weight=weight, beside={"ids": ids}) or weight.shape[1] == 0:
        check_range(_OP, "ids", ids, rows)
        return reference(ids, weight, padding_idx=padding_idx, scale=scale)
    y = _op(ids.reshape(-1), weight, -1 if padding_idx is None else padding_idx, scale)
    return y if ids.dim() == 1 else y.view(*ids.shape, weight.shape[1])
