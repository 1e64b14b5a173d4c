"""Log-probability of each label under a linear head, and the entropy.

Contract: ``csrc/tigon/ops/linear_cross_entropy/linear_cross_entropy.h``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon._dtensor import of_vocabulary
from tigon._op import Op, has_kernel
from tigon.error import check
from tigon.ops.arguments import check_float, check_indices
from tigon.ops.loss_head import between
from tigon.ops.loss_head.labels import labels_of
from tigon.ops.loss_head.memory import check_keep
from tigon.ops.loss_head.operands import (
    MAY_ROUND,
    NEEDS,
    Operands,
    Options,
    autocast,
    check_head,
    check_lora,
    check_plain,
    lora_operands,
    main_grad_of,
    plain_weight,
    prepare,
    shifted,
    whole_vectors,
    wide_logits,
)
from tigon.ops.loss_head.operators import between_fake
from tigon.ops.loss_head.reference import plain_logits

_OP = "linear_log_prob"


def reference(hidden, weight, target, *, bias=None, temperature=1.0, softcap=None, logit_scale=1.0,
              ignore_index=-100, entropy=False, lora=None, logit_dtype=None,
              **ignored):  # fmt: skip
    """The same formula in plain PyTorch operations: materialises the logits (any float dtype, any device)."""
    del ignored
    z = plain_logits(hidden, weight, bias, softcap, logit_scale, temperature, lora, logit_dtype)
    log_p = torch.log_softmax(z, -1)
    labels = target if several(hidden, target) else target.unsqueeze(-1)
    counts = labels != ignore_index
    picked = torch.where(counts, log_p.gather(-1, torch.where(counts, labels, 0).long()), 0.0)
    picked = picked.view(target.shape)
    if not entropy:
        return picked
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p)
    return picked, torch.where(counts.any(-1), -terms.sum(-1), 0.0)


def several(hidden, target) -> bool:
    """Whether target has K labels for each row."""
    tensors = isinstance(hidden, torch.Tensor) and isinstance(target, torch.Tensor)
    return tensors and target.dim() == hidden.dim()


def _of_rows(target, ignore_index):
    """For labels [..., K] 0 where one of them counts, else -1: [...]."""
    return (target != ignore_index).any(-1).long() - 1


class _Arguments(NamedTuple):
    """The arguments of ``tigon::linear_log_prob``, in the order of its schema."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None
    ignore_index: int
    softcap: float
    logit_scale: float
    temperature: float
    wide_logits: bool
    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    lora_scale: float
    chunk_rows: int
    valid_rows: int
    entropy: bool
    needs: int
    keep_rows: int


def _operands(a: _Arguments) -> Operands:
    return Operands(a.hidden, a.weight, a.target, a.bias, lora_a=a.lora_a, lora_b=a.lora_b)


def _options(a: _Arguments) -> Options:
    return Options(
        a.ignore_index, softcap=a.softcap, logit_scale=a.logit_scale, temperature=a.temperature,
        lora_scale=a.lora_scale, wide_logits=a.wide_logits, chunk_rows=a.chunk_rows, valid_rows=a.valid_rows,
    )  # fmt: skip


def statistics_fake(hidden, target, entropy):
    """Shapes of the log-probabilities and entropies."""
    return (
        hidden.new_empty(target.shape, dtype=torch.float32),
        hidden.new_empty(target.shape[:1] if entropy else (0,), dtype=torch.float32),
    )


def _fake(*arguments):
    a = _Arguments(*arguments)
    return (
        *statistics_fake(a.hidden, a.target, a.entropy),
        *between_fake(_operands(a), _options(a), a.needs, a.keep_rows),
    )


def _setup_context(ctx, inputs, output):
    a = _Arguments(*inputs)
    _, entropies, unit, kept = output
    ctx.options = _options(a)
    ctx.save_for_backward(*between.saved(_operands(a), ctx.options, a.needs, unit, kept, a.entropy))
    ctx.main_grad = None
    ctx.dtypes = {
        name: None if t is None else t.dtype for name, t in zip(a._fields, a, strict=True) if name in NEEDS
    }
    if not a.entropy:
        ctx.mark_non_differentiable(entropies, unit, kept)
    ctx.set_materialize_grads(False)


def _backward(ctx, dlog_prob, dentropy, *_):
    wanted = _Arguments(*ctx.needs_input_grad)
    if dlog_prob is None and dentropy is None:
        return (None,) * len(wanted)
    saved = ctx.saved_tensors  # once: a checkpoint hands them out once
    if dlog_prob is None:
        _, _, _, _, target, *_ = saved
        upstream = dentropy.new_zeros(target.shape)
    else:
        upstream = -dlog_prob  # the loss is -log_prob
    needs = sum(bit for name, bit in NEEDS.items() if getattr(wanted, name))
    if not torch.compiler.is_compiling():
        needs |= MAY_ROUND
    eager = isinstance(ctx, _op.node)
    main_grad = ctx.main_grad if eager else None
    gradients = between.gradients(
        saved, upstream, dentropy, ctx.options, needs, eager=eager, main_grad=main_grad
    )
    found = {
        name: g if g is None else g.to(ctx.dtypes[name])
        for (name, bit), g in zip(NEEDS.items(), gradients, strict=True)
        if needs & bit
    }
    return tuple(found.get(name) for name in _Arguments._fields)


_op = Op(_OP, fake=_fake, setup_context=_setup_context, backward=_backward, results=2)


@of_vocabulary("linear_log_prob", 1, "weight")
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
    shift: int | bool = False,
    position_ids: torch.Tensor | None = None,
    valid_rows: int | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    keep_mb: float | None = None,
    logit_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``log softmax(z)[target]`` per token, ``z`` as in :func:`tigon.linear_cross_entropy`, without the
    logits of more than a chunk of rows ever existing.

    Matrix products, forward and backward together: 1 without gradients; 2 where hidden alone needs one (a
    frozen head): its gradient for an upstream of 1 is formed in the forward, ``N * H`` elements, and its rows
    are scaled in the backward; 3 where the gradients of all logits are kept; 4 where they are computed again;
    ``4 - f`` where a share f of the rows is kept. A gradient of the entropies needs all logits again,
    whatever was kept.

    Labels ``[..., K]`` give the log-probabilities of K classes for each row (what a loss against the K most
    likely classes of a teacher takes): ``K`` words a row more, no logits kept, so 4 products with gradients
    (3 with a frozen head). The same label may stand more than once. A row counts where one of its labels
    does.

    Args:
        target: int labels ``[...]``, or ``[..., K]`` of any ``K >= 1``; ``ignore_index`` does not count.
        hidden, weight, bias, temperature, softcap, logit_scale, ignore_index, shift, position_ids,
            valid_rows, lora, chunk_rows, logit_dtype: as in :func:`tigon.linear_cross_entropy`,
            ``main_grad`` of weight included.
        entropy: also return the entropy of each distribution, ``lse - sum_c p_c z_c``, differentiable too.
            Its gradient computes all rows again, whatever was kept: where a loss uses it, ``keep_mb=0``
            saves the product and the memory of what is kept.
        keep_mb: (one label a row) how many MiB the gradients of the logits may take between forward and
            backward (rows that are computed, times V rounded up to 64, times the size of hidden's dtype).
            ``None``: those of all rows are kept where one chunk takes all rows
            (:func:`tigon.linear_log_prob_memory` says when), since the backward would need that memory
            anyway; else none. A number: as many whole chunks as fit. 0: nothing is kept, hidden's gradient
            for a frozen head neither. Where all rows are kept, or the head is frozen, and no entropies were
            asked for, weight is not saved for the backward.

    Returns:
        float32 of target's shape; with ``entropy`` a pair, of it and ``[...]``. 0 of ignored labels and rows,
        with zero gradients.

    Raises:
        tigon.Error: as :func:`tigon.linear_cross_entropy`; on CUDA a label outside ``[0, V)`` makes that row
        NaN.
    """
    target = labels_of(target, ignore_index)
    many = several(hidden, target)
    if many:
        check_float(_OP, "hidden", hidden)
        check_indices(_OP, "target", target)
        fits = target.shape[:-1] == hidden.shape[:-1] and target.shape[-1] >= 1
        check(_OP, fits, "target must be {} (and then K >= 1), got {}", hidden.shape[:-1], target.shape)
    check_head(
        _OP, hidden, weight, target[..., 0] if many else target, bias, shift, ignore_index, softcap,
        logit_scale, temperature, chunk_rows, position_ids,
    )  # fmt: skip
    check_lora(_OP, lora, hidden, weight)
    check_keep(_OP, keep_mb)
    hidden = autocast(hidden)
    wide = wide_logits(_OP, logit_dtype, hidden)
    kernel = has_kernel(_OP, hidden, beside=(target, bias, *(lora or ())[:2]))
    if many:
        if shift:
            target = shifted(target.movedim(-1, 0), ignore_index, shift, position_ids).movedim(0, -1)
        shift, position_ids = False, None
    if not kernel:
        check_plain(_OP, weight, target, ignore_index, shift, None if many else valid_rows, position_ids)
        if many:
            check_plain(_OP, weight, _of_rows(target, ignore_index), -1, False, valid_rows)
        target = shifted(target, ignore_index, shift, position_ids)
        return reference(hidden, plain_weight(_OP, weight), target, bias=bias, temperature=temperature,
                         softcap=softcap, logit_scale=logit_scale, ignore_index=ignore_index,
                         entropy=entropy, lora=lora, logit_dtype=logit_dtype)  # fmt: skip
    main_grad = main_grad_of(_OP, weight) if torch.is_grad_enabled() and weight.requires_grad else None
    if main_grad is None:  # main_grad has weight's own columns
        hidden, weight, lora = whole_vectors(hidden, weight, lora)
    lora_a, lora_b, lora_scale = lora_operands(hidden, lora)
    rows = target
    if many:  # the number of rows that count is found where it costs no wait
        target = target.to(hidden.device, non_blocking=True).long()
        rows = target[..., 0] if rows.is_cuda else _of_rows(rows, ignore_index)
    operands, known_rows, needs = prepare(
        _OP, hidden, weight, rows, bias, -1 if many else ignore_index, shift, valid_rows, lora_a=lora_a,
        lora_b=lora_b, wide=wide, position_ids=position_ids,
    )  # fmt: skip
    if many:
        operands = operands._replace(target=target.reshape(-1, target.shape[-1]))
    options = Options(
        ignore_index, softcap=softcap or 0.0, logit_scale=logit_scale, temperature=temperature,
        lora_scale=lora_scale, wide_logits=wide, chunk_rows=chunk_rows or 0, valid_rows=known_rows,
    )  # fmt: skip
    needs, keep_rows = between.keep(operands, needs, 0 if many else keep_mb, main_grad)
    result, entropies = _op(*_Arguments(
        operands.hidden, operands.weight, operands.target, operands.bias, ignore_index, options.softcap,
        logit_scale, temperature, wide, lora_a, lora_b, lora_scale, options.chunk_rows, known_rows, entropy,
        needs, keep_rows,
    ))  # fmt: skip
    if main_grad is not None and isinstance(result.grad_fn, _op.node):  # eager: grad_fn is what backward sees
        result.grad_fn.main_grad = main_grad
    result = result.view(target.shape)
    return (result, entropies.view(hidden.shape[:-1])) if entropy else result
