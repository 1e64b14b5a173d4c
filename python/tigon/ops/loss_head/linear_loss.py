"""Streaming losses: a Python function of log-probabilities, differentiated while its chunk's logits exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from tigon._op import has_kernel, refuse_tangents
from tigon.error import check
from tigon.ops import cross_entropy as _cross_entropy
from tigon.ops.arguments import check_choice, is_traced, kind_of
from tigon.ops.loss_head import linear_log_prob as _log_prob
from tigon.ops.loss_head.groups import Groups
from tigon.ops.loss_head.labels import labels_of
from tigon.ops.loss_head.operands import (
    REDUCTIONS,
    Options,
    autocast,
    check_head,
    check_plain,
    plain_weight,
    prepare,
    shifted,
    whole_vectors,
    wide_logits,
)
from tigon.ops.loss_head.streaming import OP as _OP
from tigon.ops.loss_head.streaming import Call, Function, losses


def _composed(
    hidden, weight, target, fn, tensors, entropy, reduction, denominator, log_prob, options, groups
):  # fmt: skip
    """Log-probabilities of all rows, then fn: for unreduced losses, whose upstream gradients come later."""
    ignore_index = options["ignore_index"]
    statistics = log_prob(hidden, weight, target, entropy=entropy, **options)
    statistics = [s.reshape(-1) for s in (statistics if entropy else (statistics,))]
    if groups is None:
        counts = (target != ignore_index).reshape(-1)
        values = losses(fn, statistics, tensors, counts)
    else:
        seen = [groups.part(s.view(target.shape), 0, groups.number) for s in statistics]
        parts = [groups.part(t, 0, groups.number) for t in tensors]
        values = losses(fn, seen, parts, None, groups.number)
    if denominator is not None:
        return _cross_entropy.divide(values.sum(), denominator)
    if reduction == "none":
        return values.view(target.shape) if groups is None else values
    if reduction == "sum":
        return values.sum()
    return values.sum() / (counts.sum() if groups is None else groups.number)


@torch._disable_dynamo  # torch.compiler.disable, but the compiler is imported by the first call, not here
def linear_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    fn: Callable[..., torch.Tensor],
    *tensors: torch.Tensor,
    bias: torch.Tensor | None = None,
    entropy: bool = False,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    shift: int | bool = False,
    position_ids: torch.Tensor | None = None,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    valid_rows: int | None = None,
    chunk_rows: int | None = None,
    logit_dtype: torch.dtype | None = None,
    group: str | None = None,
) -> torch.Tensor:
    """A loss of your own on per-token log-probabilities, three matrix products and no logits.

    ``fn(log_prob, [entropy,] *tensors)`` is called for chunks of rows and returns one loss per row; its
    gradient is taken by autograd while the chunk's logits still exist. It must treat rows one by one (a row's
    loss depends on that row alone): then the chunking does not change the result beyond the order of
    additions.

    Args:
        hidden, weight, target, bias, temperature, softcap, logit_scale, ignore_index, shift,
            position_ids, valid_rows, chunk_rows, logit_dtype: as in :func:`tigon.linear_cross_entropy`.
        fn: called with float32 vectors of one chunk. Rows with an ignored label may be among them; what it
            returns there is dropped. Tensors that need a gradient must come in through `tensors`.
        *tensors: per-token tensors ``[..., ...]`` (the leading shape of target), handed to fn row by row;
            differentiable.
        entropy: fn takes the entropies as its second argument.
        reduction: ``"mean"`` (over rows that count), ``"sum"``, or ``"none"``: ``[...]`` losses, by way
            of :func:`tigon.linear_log_prob` and at its cost.
        denominator: number or tensor of one element: ``sum / denominator`` instead of ``reduction``.
        group: what a loss belongs to where rows depend on each other. ``None``: a row. ``"sequence"``: an
            answer of target ``[B, T]``; fn takes float32 ``[s, T]`` of s whole answers. ``"pair"``: answers g
            and ``B/2 + g`` (chosen, rejected); fn takes ``[2, s, T]``. It returns ``[s]`` losses; a mean is
            over groups, one without any label that counts among them. Log-probabilities and entropies are 0
            at ignored labels, and get no gradient there; hand the mask over as one of `tensors` where fn
            divides by a length. `tensors` are ``[B, T, ...]`` or ``[B]``, seen as ``[s, T, ...]`` or ``[s]``
            (pairs: with 2 in front). Groups share chunks whole: three products; a longer one makes the chunk
            longer, up to 1 GiB of logits, and where it does not fit (or ``chunk_rows`` forbids it) the loss
            takes :func:`tigon.linear_log_prob`, at its cost. Ignored rows cost nothing on the CPU, and on
            CUDA after ``tigon.count_labels(target, per_sequence=True)``.

    Returns:
        float32 scalar, or for ``"none"`` ``[...]`` losses of rows or ``[groups]``. Not traced by
        torch.compile: the call breaks the graph.

    Raises:
        tigon.Error: shapes, dtypes or options do not fit, or fn returns something else than one loss per row
        or group.
    """
    target = labels_of(target, ignore_index)
    check_head(
        _OP, hidden, weight, target, bias, shift, ignore_index, softcap, logit_scale, temperature, chunk_rows,
        position_ids,
    )  # fmt: skip
    check(_OP, callable(fn), "fn must be callable, got {}", kind_of(fn))
    _cross_entropy.check_denominator(_OP, denominator)
    check_choice(_OP, "reduction", reduction, REDUCTIONS)
    groups = None if group is None else Groups(_OP, group, target, ignore_index, shift, position_ids)
    for t in tensors:
        check(_OP, isinstance(t, torch.Tensor), "tensors must be tensors, got {}", kind_of(t))
        fits = t.shape[: target.dim()] == target.shape or (groups is not None and t.shape == target.shape[:1])
        check(_OP, fits, "tensors must be {} or longer, got {}", target.shape, t.shape)
        check(_OP, t.device == hidden.device, "tensors must be on {}, got {}", hidden.device, t.device)
    if groups is None:
        tensors = [t.reshape(target.numel(), *t.shape[target.dim() :]) for t in tensors]
    else:
        tensors = [t.contiguous() for t in tensors]
    hidden = autocast(hidden)
    wide = wide_logits(_OP, logit_dtype, hidden)
    kernel = has_kernel(_OP, hidden)
    if not kernel:
        check_plain(_OP, weight, target, ignore_index, shift, valid_rows, position_ids)
    apart = groups is not None and not groups.fit(
        _OP, hidden.device.type, hidden.dtype, *weight.shape[::-1],
        torch.is_grad_enabled() and weight.requires_grad, chunk_rows,
    )  # fmt: skip
    if not kernel or apart or is_traced(hidden) or (reduction == "none" and denominator is None):
        log_prob = _log_prob.linear_log_prob if kernel else _log_prob.reference
        options = {"bias": bias, "temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
        options |= {"ignore_index": ignore_index, "valid_rows": valid_rows, "chunk_rows": chunk_rows}
        options |= {"logit_dtype": logit_dtype}
        weight = weight if kernel else plain_weight(_OP, weight)
        target = shifted(target, ignore_index, shift, position_ids)
        return _composed(
            hidden, weight, target, fn, tensors, entropy, reduction, denominator, log_prob, options, groups
        )
    transformed = torch._C._are_functorch_transforms_active()
    check(
        _OP, not transformed, 'the transforms of torch.func must take reduction="none", got {!r}', reduction
    )
    if forward_ad._current_level >= 0:
        refuse_tangents(_OP, (hidden, weight, bias, *tensors))
    hidden, weight, _ = whole_vectors(hidden, plain_weight(_OP, weight))
    operands, known_rows, needs = prepare(
        _OP, hidden, weight, target, bias, ignore_index, shift, valid_rows, wide=wide,
        position_ids=position_ids,
    )  # fmt: skip
    device, number = _cross_entropy.split_denominator(denominator, hidden.device)
    if device is not None:
        place = device.device
        check(_OP, place == hidden.device, "denominator must be on {}, got {}", hidden.device, place)
    divisor = device if device is not None else number
    if divisor is None:
        divisor = ("count" if groups is None else groups.number) if reduction == "mean" else 1.0
    grad = torch.is_grad_enabled()
    options = Options(
        ignore_index, softcap=softcap or 0.0, logit_scale=logit_scale, temperature=temperature,
        wide_logits=wide, chunk_rows=chunk_rows or 0, valid_rows=known_rows,
    )  # fmt: skip
    wrt = tuple(grad and t.requires_grad for t in tensors)
    call = Call(fn, options, entropy, divisor, needs, wrt, grad, groups)
    hidden, weight, target, bias, *_ = operands
    return Function.apply(call, hidden, weight, bias, target, *tensors)
