"""What ``linear_preference``, ``linear_kto`` and ``linear_policy`` share: operands, options, autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon._op import Op, may_overwrite_saved
from tigon.error import check
from tigon.ops.arguments import check_float, kind_of
from tigon.ops.loss_head import linear_log_prob as _log_prob
from tigon.ops.loss_head import operators
from tigon.ops.loss_head.memory import check_cap, chunk_that_fits
from tigon.ops.loss_head.operands import (
    MAY_ROUND,
    NEEDS,
    WEIGHT,
    Operands,
    Options,
    check_head,
    check_lora,
    lora_operands,
    prepare,
    whole_vectors,
)
from tigon.ops.loss_head.reference import plain_logits


class Head(NamedTuple):
    """The options of a head, as the caller gave them."""

    bias: torch.Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    ignore_index: int = -100
    shift: int | bool = False
    valid_rows: int | None = None
    lora: tuple | None = None
    chunk_rows: int | None = None
    max_workspace_mb: float | None = None


def check_operands(op, hidden, weight, target, head: Head) -> None:
    """Hidden states [answers, T, H] and labels [answers, T] under a head."""
    check_head(
        op, hidden, weight, target, head.bias, head.shift, head.ignore_index, head.softcap, head.logit_scale,
        head.temperature, head.chunk_rows,
    )  # fmt: skip
    check(op, target.dim() == 2, "target must be [answers, T], got {}", target.shape)
    check_lora(op, head.lora, hidden, weight)
    check_cap(op, head.max_workspace_mb)


class Native(NamedTuple):
    """A call as the native operators take it: first and last arguments."""

    operands: tuple  # hidden, weight, labels, bias, lora A, lora B
    options: tuple  # of the head


def native_call(op, hidden, weight, labels, shift, head: Head) -> Native:
    """Operands and options of a native call on checked arguments."""
    answers = labels.shape[0]
    hidden, weight, lora = whole_vectors(hidden, weight, head.lora)
    lora_a, lora_b, lora_scale = lora_operands(hidden, lora)
    same = weight.dtype == hidden.dtype  # else weight's gradient is rounded once, from float32
    operands, valid, needs = prepare(
        op,
        hidden,
        weight,
        labels,
        head.bias,
        head.ignore_index,
        shift,
        head.valid_rows,
        None,
        None,
        lora_a,
        lora_b,
    )
    chunk_rows = head.chunk_rows
    if head.max_workspace_mb is not None:
        rank = 0 if lora_a is None else lora_a.shape[0]
        chunk_rows = chunk_that_fits(
            op, head.max_workspace_mb, hidden, weight.shape[0], chunk_rows, rank, needs & WEIGHT != 0, False
        )
    needs |= MAY_ROUND * same
    numbers = (head.softcap or 0.0, head.logit_scale, head.temperature, lora_scale)
    options = (*numbers, head.ignore_index, chunk_rows or 0, valid, answers, needs)
    return Native((operands.hidden, operands.weight, operands.target, operands.bias, lora_a, lora_b), options)


def log_probs(op, hidden, weight, labels, head: Head, entropy=False):
    """Log-probabilities [answers, T] (and entropies) with a graph: in float64 of the logits, else chunked."""
    options = {"bias": head.bias, "temperature": head.temperature, "softcap": head.softcap}
    options |= {"logit_scale": head.logit_scale, "ignore_index": head.ignore_index}
    if hidden.dtype != torch.float64:
        check(op, head.lora is None, "lora must be None under the transforms of torch.func, got {}", "one")
        return _log_prob.linear_log_prob(hidden, weight, labels, entropy=entropy, **options)
    if head.lora is None:
        return _log_prob.reference(hidden, weight, labels, entropy=entropy, **options)
    z = plain_logits(hidden, weight, head.bias, head.softcap, head.logit_scale, head.temperature, head.lora)
    log_p = torch.log_softmax(z, -1)
    counts = labels != head.ignore_index
    picked = log_p.gather(-1, torch.where(counts, labels, 0).long().unsqueeze(-1)).squeeze(-1)
    picked = torch.where(counts, picked, 0.0)
    entropies = torch.where(counts, -(log_p.exp() * log_p).sum(-1), 0.0)
    return (picked, entropies) if entropy else picked


def check_ref_head(op, ref, hidden, weight) -> None:
    """A second head: (hidden, weight) or (hidden, weight, bias)."""
    tensors = all(isinstance(t, torch.Tensor) for t in ref[:2]) and len(ref) in (2, 3)
    check(op, tensors, "ref must be a float tensor or tensors (hidden, weight[, bias]), got {}", kind_of(ref))
    for t in ref:
        if t is not None:
            check_float(op, "ref", t)
    states, of_ref, *bias = ref
    check(
        op,
        states.shape[:-1] == hidden.shape[:-1],
        "ref must have rows {}, got {}",
        hidden.shape[:-1],
        states.shape,
    )
    wanted = (weight.shape[0], states.shape[-1])
    check(op, of_ref.shape == wanted, "ref must have a weight {}, got {}", list(wanted), of_ref.shape)
    if bias and bias[0] is not None:
        check(
            op,
            bias[0].shape == wanted[:1],
            "ref must have a bias {}, got {}",
            list(wanted[:1]),
            bias[0].shape,
        )
    for t in ref:
        if t is not None:
            check(op, t.device == hidden.device, "ref must be on {}, got {}", hidden.device, t.device)


def ref_operands(ref, like):
    """The reference's operands as constants in the dtype of `like`."""
    states, weight, *bias = (None if t is None else t.detach() for t in ref)
    states, weight, _ = whole_vectors(states.to(like.dtype), weight.to(like.dtype))
    bias = bias[0] if bias else None
    if bias is not None and bias.dtype not in (like.dtype, torch.float32):
        bias = bias.float()
    return states, weight, bias


# Autograd: the gradients exist when the loss does.

VISIBLE = 5  # results of either operator that callers see; then the scale and five gradients


def fake_gradients(arguments):
    """Of the scale and the gradients."""
    hidden, weight, labels, bias, lora_a, lora_b, *_ = arguments
    *_, chunk_rows, valid_rows, _, needs = arguments
    operands = Operands(hidden, weight, labels, bias, lora_a=lora_a, lora_b=lora_b)
    options = Options(chunk_rows=chunk_rows, valid_rows=valid_rows)
    scale = hidden.new_empty((), dtype=torch.float32)
    return scale, *operators.empty_gradients(operands, options, needs)


def _setup_context(ctx, inputs, output):
    hidden, weight, _, bias, *_ = inputs
    ctx.dtypes = (
        hidden.dtype,
        weight.dtype,
        weight.dtype if bias is None else bias.dtype,
        hidden.dtype,
        hidden.dtype,
    )
    ctx.needs, ctx.inputs = inputs[-1], len(inputs)
    ctx.save_for_backward(*output[VISIBLE:])
    ctx.mark_non_differentiable(*output[1:VISIBLE])
    ctx.set_materialize_grads(False)


_PLACES = {"hidden": 0, "weight": 1, "bias": 3, "lora_a": 4, "lora_b": 5}


def _backward(ctx, dloss, *_):
    found = [None] * ctx.inputs
    if dloss is None:
        return tuple(found)
    saved = ctx.saved_tensors  # once: a checkpoint hands them out once
    finish = operators.finish_in_place if may_overwrite_saved(saved) else operators.finish
    _, of_weight, of_bias, *_ = ctx.dtypes
    gradients = finish(dloss, *saved, of_weight, of_bias)
    for (name, bit), g, dtype in zip(NEEDS.items(), gradients, ctx.dtypes, strict=True):
        if ctx.needs & bit:
            found[_PLACES[name]] = g if g.dtype == dtype else g.to(dtype)
    return tuple(found)


def token_loss_op(name, fake) -> Op:
    """``tigon::<name>`` as a differentiable operator."""
    return Op(name, fake=fake, setup_context=_setup_context, backward=_backward, results=VISIBLE)


def plain(hidden) -> bool:
    """Whether log-probabilities come first, with a graph of their own: under the transforms of torch.func."""
    return torch._C._are_functorch_transforms_active() or kind_of(hidden) == torch.float64
