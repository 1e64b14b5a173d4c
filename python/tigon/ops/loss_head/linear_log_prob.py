"""Log-probability of each label under a linear head, and the entropy.

Contract: ``csrc/tigon/ops/linear_cross_entropy/linear_cross_entropy.h``.
"""

from __future__ import annotations

import torch

from tigon._op import Op, has_kernel
from tigon.ops.loss_head.operands import (
    BIAS,
    HIDDEN,
    MAY_ROUND,
    WEIGHT,
    Operands,
    Options,
    autocast,
    check_head,
    check_plain,
    prepare,
    shifted,
    whole_vectors,
)
from tigon.ops.loss_head.operators import rows_backward
from tigon.ops.loss_head.reference import plain_logits

_OP = "linear_log_prob"


def reference(hidden, weight, target, *, bias=None, temperature=1.0, softcap=None, logit_scale=1.0,
              ignore_index=-100, entropy=False, **ignored):  # fmt: skip
    """The same formula in plain PyTorch operations: materialises the logits (any float dtype, any device)."""
    del ignored
    z = plain_logits(hidden, weight, bias, softcap, logit_scale, temperature)
    log_p = torch.log_softmax(z, -1)
    counts = target != ignore_index
    picked = log_p.gather(-1, torch.where(counts, target, 0).long().unsqueeze(-1)).squeeze(-1)
    picked = torch.where(counts, picked, 0.0)
    if not entropy:
        return picked
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p)
    return picked, torch.where(counts, -terms.sum(-1), 0.0)


def fake(hidden, weight, target, *options):
    """Shapes of the log-probabilities and entropies."""
    *_, entropy = options
    rows = target.shape
    return (
        hidden.new_empty(rows, dtype=torch.float32),
        hidden.new_empty(rows if entropy else (0,), dtype=torch.float32),
    )


def _setup_context(ctx, inputs, output):
    (hidden, weight, target, bias, ignore_index, softcap, logit_scale, temperature, chunk_rows, valid_rows,
     entropy) = inputs  # fmt: skip
    ctx.save_for_backward(hidden, weight, target, bias)
    ctx.options = Options(
        ignore_index, softcap=softcap, logit_scale=logit_scale, temperature=temperature,
        chunk_rows=chunk_rows, valid_rows=valid_rows,
    )  # fmt: skip
    ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
    if not entropy:
        _, entropies = output
        ctx.mark_non_differentiable(entropies)
    ctx.set_materialize_grads(False)


def _backward(ctx, dlog_prob, dentropy):
    of_hidden, of_weight, _, of_bias, *others = ctx.needs_input_grad
    nothing = (None,) * len(others)
    if dlog_prob is None and dentropy is None:
        return None, None, None, None, *nothing
    upstream = torch.zeros_like(dentropy) if dlog_prob is None else -dlog_prob  # the loss is -log_prob
    needs = HIDDEN * of_hidden + WEIGHT * of_weight + BIAS * of_bias
    if not torch.compiler.is_compiling():
        needs |= MAY_ROUND
    gradients = rows_backward(upstream, dentropy, *Operands(*ctx.saved_tensors), *ctx.options, needs)
    dhidden, dweight, dbias = (
        g.to(dtype) if needed else None
        for g, dtype, needed in zip(gradients, ctx.dtypes, (of_hidden, of_weight, of_bias), strict=False)
    )
    return dhidden, dweight, None, dbias, *nothing


_op = Op(_OP, fake=fake, setup_context=_setup_context, backward=_backward)


def linear_log_prob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    shift: bool = False,
    valid_rows: int | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``log softmax(z)[target]`` per token, ``z`` as in :func:`tigon.linear_cross_entropy`, without the
    logits ever existing.

    The backward computes the logits again, chunk by chunk, with the upstream gradients of both results folded
    in: four matrix products in all; without gradients one.

    Args:
        hidden, weight, target, bias, temperature, softcap, logit_scale, ignore_index, shift, valid_rows,
            chunk_rows: as in :func:`tigon.linear_cross_entropy`.
        entropy: also return the entropy of each distribution, ``lse - sum_c p_c z_c``, differentiable too.

    Returns:
        float32 ``[...]``, or a pair of them. 0 on ignored rows, with zero gradients.

    Raises:
        tigon.Error: as :func:`tigon.linear_cross_entropy`; on CUDA a label outside ``[0, V)`` makes that row
        NaN.
    """
    check_head(
        _OP, hidden, weight, target, bias, shift, ignore_index, softcap, logit_scale, temperature, chunk_rows
    )
    hidden = autocast(hidden)
    if not has_kernel(_OP, hidden):
        check_plain(_OP, weight, target, ignore_index, shift, valid_rows)
        target = shifted(target, ignore_index) if shift else target
        return reference(hidden, weight, target, bias=bias, temperature=temperature, softcap=softcap,
                         logit_scale=logit_scale, ignore_index=ignore_index, entropy=entropy)  # fmt: skip
    hidden, weight, _ = whole_vectors(hidden, weight)
    operands, known_rows, _ = prepare(_OP, hidden, weight, target, bias, ignore_index, shift, valid_rows)
    result, entropies = _op(
        operands.hidden, operands.weight, operands.target, operands.bias, ignore_index, softcap or 0.0,
        logit_scale, temperature, chunk_rows or 0, known_rows, entropy,
    )  # fmt: skip
    result = result.view(target.shape)
    return (result, entropies.view(target.shape)) if entropy else result
