"""Log-probability of each label under a linear head, and the entropy.

Contract: ``csrc/tigon/ops/linear_cross_entropy/linear_cross_entropy.h``.
"""

from __future__ import annotations

import torch

from tigon._dtensor import of_vocabulary
from tigon._op import Op, has_kernel
from tigon.error import check
from tigon.ops.arguments import called, check_booleans, check_float, check_indices, check_range, known_labels
from tigon.ops.loss_head import autograd, operands
from tigon.ops.loss_head.labels import check_valid_rows, labels_of, shifted
from tigon.ops.loss_head.match import WithValue, check_match, vllm_log_prob
from tigon.ops.loss_head.operands import HeadCall, TrainedCalls
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import Sizes, check_keep
from tigon.ops.loss_head.reference import plain_logits

_OP = "linear_log_prob"


def reference(hidden, weight, target, *, entropy=False, **options):
    """Compute the same formula with PyTorch operations and full logits (any float dtype, any device)."""
    head = HeadOptions.of(options)
    log_p = torch.log_softmax(plain_logits(hidden, weight, head), -1)
    labels = target if has_several_labels(hidden, target) else target.unsqueeze(-1)
    labels, factor = known_labels(labels.long(), head.ignore_index, log_p.shape[-1])
    counts = labels != head.ignore_index
    picked = log_p.gather(-1, torch.where(counts, labels, 0))
    picked = torch.where(counts, picked if factor is None else picked * factor, 0.0)
    picked = picked.view(target.shape)
    if not entropy:
        return picked
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p)
    return picked, torch.where(counts.any(-1), -terms.sum(-1), 0.0)


def has_several_labels(hidden, target) -> bool:
    """Whether target has K labels for each row."""
    tensors = isinstance(hidden, torch.Tensor) and isinstance(target, torch.Tensor)
    return tensors and target.dim() == hidden.dim()


def _counting_rows(target, ignore_index):
    """Return ``[...]`` for labels ``[..., K]``: 0 if at least one label counts, else -1."""
    return (target != ignore_index).any(-1).long() - 1


_own = operands.own_arguments(_OP)


def _fake(*arguments):
    call = HeadCall.of(arguments, _own)
    entropy, hidden, target = call.own.entropy, call.operands.hidden, call.operands.target
    shapes = target.shape, target.shape[:1] if entropy else (0,)
    statistics = (hidden.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return *statistics, *autograd.empty_kept(call)


def _setup_context(ctx, inputs, output):
    call, (_, entropies, unscaled, kept) = HeadCall.of(inputs, _own), output
    entropy, of = call.own.entropy, call.operands
    ctx.call, ctx.arguments, ctx.main_grad = call.without_tensors(), len(inputs), None
    ctx.save_for_backward(*autograd.tensors_to_save(call, unscaled, kept, entropy))
    ctx.dtypes = autograd.dtypes_of(of.hidden, of.weight, of.bias)
    ctx.rows_shape = of.target.shape
    if not entropy:
        ctx.mark_non_differentiable(entropies, unscaled, kept)
    ctx.set_materialize_grads(False)


def _backward(ctx, dlog_prob, dentropy, *_):
    if dlog_prob is None and dentropy is None:
        return (None,) * ctx.arguments
    # The loss is -log_prob.
    upstream = dentropy.new_zeros(ctx.rows_shape) if dlog_prob is None else -dlog_prob
    needs = ctx.call.memory.needs & (operands.LOGITS | operands.BY_CLASSES)
    needs |= autograd.needs_of(ctx.needs_input_grad)
    if not torch.compiler.is_compiling():
        needs |= operands.MAY_ROUND
    call, eager = ctx.call.with_memory(needs=needs, keep_rows=0), isinstance(ctx, _op.node)
    main_grad = ctx.main_grad if eager else None
    gradients = autograd.rows_gradients(
        ctx.saved_tensors, upstream, call, dentropy, eager=eager, main_grad=main_grad
    )
    return autograd.by_argument(gradients, needs, ctx.dtypes, ctx.arguments)


_op = Op(_OP, fake=_fake, setup_context=_setup_context, backward=_backward, results=2)


@of_vocabulary("linear_log_prob", 1, "weight")
@called()
def linear_log_prob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    entropy: bool = False,
    match: str | None = None,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    shift: int | bool = False,
    position_ids: torch.Tensor | None = None,
    valid_rows: int | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_peak_mb: float | None = None,
    keep_mb: float | None = None,
    logit_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``log softmax(z)[target]`` per token, with ``z`` as in :func:`tigon.linear_cross_entropy`. Only one
    chunk of rows has logits in memory at a time.

    The number of matmuls, forward and backward together:

    - 1 without gradients.
    - 2 if only hidden needs a gradient (a frozen head). The forward computes this gradient for an upstream
      gradient of 1 and saves it, ``N * H`` elements; the backward scales its rows.
    - 3 if the gradients of all logits are kept for the backward.
    - 4 if the backward computes the logits again.
    - ``4 - f`` if a share f of the rows is kept.

    With ``entropy`` the logits are kept instead of their gradients, which takes no more matmuls. With a
    frozen head a gradient of the entropies computes all logits again: 4 matmuls. With ``logit_dtype`` it
    does so too: 5 matmuls.

    Labels ``[..., K]`` give the log-probabilities of K classes for each row, as a loss against the K most
    likely classes of a teacher needs them. They take ``K`` more numbers a row and keep no logits, so the call
    takes 4 matmuls with gradients (3 with a frozen head). The same label may occur more than once. A row
    counts if at least one of its labels counts.

    Args:
        target: int labels ``[...]``, or ``[..., K]`` of any ``K >= 1``; ``ignore_index`` does not count.
        hidden, weight, bias, temperature, softcap, logit_scale, ignore_index, shift, position_ids,
            valid_rows, lora, chunk_rows, max_peak_mb, logit_dtype: as in
            :func:`tigon.linear_cross_entropy`, including ``main_grad`` of weight.
        entropy: also return the entropy of each distribution, ``lse - sum_c p_c z_c``. It is differentiable.
        keep_mb: (one label a row) how many MiB the gradients of the logits may take between forward and
            backward (computed rows, times V rounded up to 64, times the size of hidden's dtype). ``None``:
            the gradients of all rows are kept if one chunk holds all rows
            (:func:`tigon.linear_log_prob_memory` says when), since the backward would need that memory
            anyway; otherwise none are kept. A number: as many whole chunks as fit are kept. 0: nothing is
            kept, not even hidden's gradient for a frozen head. Without ``entropy``, weight is not saved for
            the backward if all rows are kept or the head is frozen.
        match: ``"vllm"``: the values are bitwise equal to those of vLLM's head and sampler if the matmul
            gives equal results. Logits, bias, softcap and scale are each rounded to hidden's dtype; the
            division by temperature and ``log_softmax`` are computed in float32. PyTorch computes the matmul,
            or Tigon in :func:`tigon.deterministic` mode. Gradients and entropies are those without ``match``:
            if they are requested, the call takes one more matmul and a few more passes over the logits. All
            rows are computed.

    Returns:
        float32 of target's shape; with ``entropy`` a pair of that tensor and the entropies ``[...]``. Both
        are 0 for ignored labels and rows, with zero gradients.

    Raises:
        tigon.Error: as :func:`tigon.linear_cross_entropy`; on CUDA a label outside ``[0, V)`` makes that row
        NaN.
    """
    logits = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    labels = {"ignore_index": ignore_index, "shift": shift, "position_ids": position_ids}
    limits = {"valid_rows": valid_rows, "chunk_rows": chunk_rows, "max_peak_mb": max_peak_mb}
    head = HeadOptions(**logits, **labels, **limits, lora=lora, logit_dtype=logit_dtype)
    target = labels_of(target, ignore_index)
    several_labels = has_several_labels(hidden, target)
    if several_labels:
        check_float(_OP, "hidden", hidden)
        check_indices(_OP, "target", target)
        fits = target.shape[:-1] == hidden.shape[:-1] and target.shape[-1] >= 1
        check(_OP, fits, "target must be {} (and then K >= 1), got {}", hidden.shape[:-1], target.shape)
    operands.check_head(_OP, hidden, weight, target[..., 0] if several_labels else target, head)
    check_keep(_OP, keep_mb)
    check_match(_OP, match, head)
    check_booleans(_OP, entropy=entropy)
    TrainedCalls.count(hidden, weight)
    hidden = operands.autocast(hidden)
    operands.wide_logits(_OP, logit_dtype, hidden)
    if several_labels:
        if shift:
            target = shifted(target.movedim(-1, 0), **labels).movedim(0, -1)
        head = head._replace(shift=False, position_ids=None)
    if match is not None:
        return _matched(hidden, weight, target, head, entropy, keep_mb)
    if not has_kernel(_OP, hidden=hidden, beside=operands.float_parts(head, target=target)):
        return _plain(hidden, weight, target, head, entropy)
    main_grad = operands.main_grad_of(_OP, weight)
    call = _native_call(hidden, weight, target, head, main_grad=main_grad, own=_own(entropy=entropy))
    call = autograd.with_kept_rows(call, 0 if several_labels else keep_mb, main_grad, entropy)
    sizes = Sizes(per_row=True, classes=not several_labels)
    extra_bytes = 8 * target.numel() if several_labels else 0
    call = operands.within_peak(_OP, call, head, sizes, weight, main_grad, extra_bytes=extra_bytes)
    result, entropies = _op(*call.flat())
    if main_grad is not None and isinstance(result.grad_fn, _op.node):  # eager: grad_fn is the backward's ctx
        result.grad_fn.main_grad = main_grad
    result = result.view(target.shape)
    return (result, entropies.view(hidden.shape[:-1])) if entropy else result


def _matched(hidden, weight, target, head: HeadOptions, entropy, keep_mb):
    """The values of a sampler, with the gradients and the entropies of a call without `match`."""
    places = {"shift": head.shift, "position_ids": head.position_ids}
    labels = shifted(target, head.ignore_index, **places)
    check_range(_OP, "target", labels, weight.shape[0], head.ignore_index)
    counted = _counting_rows(labels, head.ignore_index), -1
    counted = counted if has_several_labels(hidden, target) else (labels, head.ignore_index)
    check_valid_rows(_OP, *counted, head.valid_rows)
    wide = operands.wide_logits(_OP, head.logit_dtype, hidden)
    value = vllm_log_prob(hidden, weight, labels, head, wide)
    trained = any(t is not None and t.requires_grad for t in (hidden, weight, head.bias))
    if not entropy and not (trained and torch.is_grad_enabled()):
        return value
    options = places | head.log_prob_options()
    result = linear_log_prob(hidden, weight, target, entropy=entropy, keep_mb=keep_mb, **options)
    return (WithValue.apply(result[0], value), result[1]) if entropy else WithValue.apply(result, value)


def _plain(hidden, weight, target, head: HeadOptions, entropy):
    """Run the reference on checked arguments."""
    if has_several_labels(hidden, target):
        operands.check_plain(_OP, weight.shape[0], target, head._replace(valid_rows=None))
        rows = _counting_rows(target, head.ignore_index)
        operands.check_plain(_OP, weight.shape[0], rows, head._replace(ignore_index=-1))
    else:
        operands.check_plain(_OP, weight.shape[0], target, head)
    target = shifted(target, head.ignore_index, head.shift, head.position_ids)
    weight = operands.plain_weight(_OP, weight)
    return reference(hidden, weight, target, entropy=entropy, **head.log_prob_options())


def _native_call(hidden, weight, target, head: HeadOptions, **others) -> HeadCall:
    """Make the native call; rows with several labels are counted if that needs no synchronisation."""
    if not has_several_labels(hidden, target):
        return operands.native_call(_OP, hidden, weight, target, head, **others)[0]
    labels, ignore_index = target.to(hidden.device, non_blocking=True).long(), head.ignore_index
    rows = labels[..., 0] if target.is_cuda else _counting_rows(target, ignore_index)
    call, _ = operands.native_call(_OP, hidden, weight, rows, head._replace(ignore_index=-1), **others)
    every = call.operands._replace(target=labels.reshape(-1, labels.shape[-1]))
    return call._replace(operands=every, formula=call.formula._replace(ignore_index=ignore_index))
