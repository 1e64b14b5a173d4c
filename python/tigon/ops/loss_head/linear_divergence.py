"""Divergences between a student's head and a teacher's.

Contract: ``csrc/tigon/ops/linear_divergence/linear_divergence.h``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tigon._dtensor import KERNEL_DTYPES
from tigon._op import has_kernel
from tigon.error import check
from tigon.ops import arguments
from tigon.ops import cross_entropy as _cross_entropy
from tigon.ops import divergence as _divergence
from tigon.ops.loss_head import operands, top_k
from tigon.ops.loss_head.autograd import empty_loss, empty_numbers, teacher_head_loss
from tigon.ops.loss_head.labels import labels_of, shifted
from tigon.ops.loss_head.linear_log_prob import linear_log_prob
from tigon.ops.loss_head.operands import HeadCall, TrainedCalls
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import Planner, Sizes, check_unbounded
from tigon.ops.loss_head.reference import plain_logits, result_type

_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2, "tvd": 3}
_REDUCTIONS = {"none": "none", "sum": "sum", "batchmean": "mean", "mean": "mean"}
NUMBERS = {"soft": 1, "hard": 2, "entropy": 4}  # bits of `outputs`
OUTPUTS = ("loss", *NUMBERS)
_OP = "linear_divergence"
_WORDS = {"target": "labels"}  # names of the arguments in these functions, if the head's differ


class Divergence(NamedTuple):
    """A divergence from a teacher, as the caller gave it, and how the rows' losses are reduced."""

    teacher: Any
    kind: str
    beta: float = 0.5
    soft: float = 1.0
    hard: float = 0.0
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0
    token_weight: torch.Tensor | None = None
    reduction: str = "batchmean"
    denominator: float | torch.Tensor | None = None
    outputs: tuple[str, ...] = ("loss",)

    def results(self, loss, results):
        """Make the caller's results of the loss and the named results of rows."""
        if self.outputs == ("loss",):
            return loss
        results["loss"] = loss
        return result_type(self.outputs, "LinearDivergence")(*(results[name] for name in self.outputs))

    def reduce(self, soft, hard, counts, classes):
        """Reduce the rows' terms to the loss."""
        rows = self.soft * soft
        rows = rows + self.hard * hard if self.hard != 0.0 else rows
        rows = rows if self.token_weight is None else rows * self.token_weight.detach()
        if self.denominator is not None:
            return _cross_entropy.divide(rows.sum(), self.denominator)
        if self.reduction == "none":
            return rows
        number = {"sum": 1, "batchmean": counts.sum(), "mean": counts.sum() * classes}[self.reduction]
        return rows.sum() / number


def _fake(call: HeadCall):
    return *empty_loss(call, call.own.reduction != 0), empty_numbers(call, NUMBERS.values())


_loss = teacher_head_loss(_OP, _fake)


def reference(hidden, weight, teacher, labels, head: HeadOptions, d: Divergence):
    """Compute the same formula with PyTorch operations and full logits (any float dtype, any device).

    Args:
        teacher: hidden states (or logits), weight and bias; None for one that is not given.
    """
    ignore_index, temperature = head.ignore_index, head.temperature
    labels = shifted(labels, ignore_index, head.shift, head.position_ids)
    states, teacher_weight, teacher_bias = teacher
    wide = torch.promote_types(hidden.dtype, torch.float32)
    with torch.no_grad():
        logits = states.to(wide)
        logits = logits if teacher_weight is None else F.linear(logits, teacher_weight.to(wide))
    classes = min(weight.shape[0], logits.shape[-1])

    def capped(logits, bias, scale, cap):
        z = logits[..., :classes] if bias is None else logits[..., :classes] + bias[:classes].to(wide)
        return z * scale if cap is None else cap * torch.tanh(z * scale / cap)

    t = capped(logits, teacher_bias, d.teacher_logit_scale, d.teacher_softcap) / temperature
    logits = plain_logits(hidden.to(wide), weight.to(wide), HeadOptions(lora=head.lora))
    s = capped(logits, head.bias, head.logit_scale, head.softcap)
    options = {"kind": d.kind, "beta": d.beta, "reduction": "none", "ignore_index": ignore_index}
    soft_rows = _divergence.reference(s / temperature, t, labels, **options)
    counts, hard_rows = labels != ignore_index, None
    results = {"soft": soft_rows.detach()}
    if d.hard != 0.0 or "hard" in d.outputs:
        hard_rows = _cross_entropy.reference(s, labels, ignore_index=ignore_index, reduction="none")
        results["hard"] = hard_rows.detach()
    if "entropy" in d.outputs:
        log_p = torch.log_softmax(s.detach() / temperature, -1)
        entropy = -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(-1)
        results["entropy"] = torch.where(counts, entropy, 0.0)
    return d.results(d.reduce(soft_rows, hard_rows, counts, classes), results)


class _Teacher(NamedTuple):
    """The teacher's hidden states, weight and bias, or only its logits; detached."""

    states: torch.Tensor
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def _check_teacher(op, teacher, hidden, classes) -> _Teacher:
    """Check the teacher of these hidden states, whose head has so many classes."""
    lead = hidden.shape[:-1]
    if isinstance(teacher, torch.Tensor):
        arguments.check_float(op, "teacher", teacher)
        fits = teacher.dim() == len(lead) + 1 and teacher.shape[:-1] == lead and teacher.shape[-1] >= 1
        check(op, fits, "teacher must be logits {} and then V, got {}", lead, teacher.shape)
        # Padding is a small part of the classes, and no coincidence gives a teacher hidden's columns.
        given = teacher.shape[-1]
        far = max(given, classes) > 2 * min(given, classes) or given == hidden.shape[-1]
        words = (
            "teacher must be logits of about weight's {} classes, or (hidden, weight), got {} columns alone"
        )
        check(op, given == classes or not far, words, classes, given)
        return _Teacher(teacher.detach())
    parts = isinstance(teacher, Sequence) and len(teacher) in (2, 3)
    given = len(teacher) if isinstance(teacher, Sequence) else arguments.kind_of(teacher)
    check(op, parts, "teacher must be logits, or (hidden, weight) or (hidden, weight, bias), got {}", given)
    states, weight, bias = (*teacher, None)[:3]
    arguments.check_float(op, "teacher_hidden", states)
    arguments.check_float(op, "teacher_weight", weight)
    fits = states.dim() == len(lead) + 1 and states.shape[:-1] == lead and states.shape[-1] >= 1
    check(op, fits, "teacher_hidden must be {} and then H, got {}", lead, states.shape)
    fits = weight.dim() == 2 and weight.shape[1] == states.shape[-1] and weight.shape[0] >= 1
    check(op, fits, "teacher_weight must be [V, {}], got {}", states.shape[-1], weight.shape)
    if bias is not None:
        arguments.check_float(op, "teacher_bias", bias)
        arguments.check_shape(op, "teacher_bias", bias, weight.shape[:1])
    return _Teacher(states.detach(), weight.detach(), None if bias is None else bias.detach())


def check_options(op, lead, device, labels, head: HeadOptions, d: Divergence):
    """Check the options; the labels [*lead], head and d. Without labels every row counts."""
    arguments.check_integers(op, ignore_index=head.ignore_index)
    has_labels = labels is not None
    outputs = operands.check_outputs(op, d.outputs, OUTPUTS)
    if outputs is not d.outputs:
        d = d._replace(outputs=outputs)
    arguments.check_numbers(op, soft=d.soft, hard=d.hard, teacher_logit_scale=d.teacher_logit_scale)
    check(op, d.soft >= 0, "soft must be >= 0, got {}", d.soft)
    check(op, d.hard >= 0, "hard must be >= 0, got {}", d.hard)
    wanted = d.hard != 0.0 or "hard" in d.outputs
    check(op, has_labels or not wanted, "labels must be given for the hard loss, got None")
    if not isinstance(head.shift, bool):
        arguments.check_integers(op, least=0, shift=head.shift)
    check(op, has_labels or not head.shift, "labels must be given with shift=True, got None")
    if not has_labels:
        labels = torch.zeros(lead, dtype=torch.int64, device=device)
        head = head._replace(ignore_index=-100)
    labels = labels_of(labels, head.ignore_index)
    arguments.check_positive(op, "teacher_softcap", d.teacher_softcap, or_none=True)
    arguments.check_choice(op, "reduction", d.reduction, _REDUCTIONS)
    _cross_entropy.check_denominator(op, d.denominator)
    if top_k.is_top_k(d.teacher):
        top_k.check_top_k(op, d.teacher, lead, device)
        check_unbounded(op, head.max_peak_mb, "with a teacher's K classes")
        plain_side = d.teacher_softcap is None and d.teacher_logit_scale == 1.0
        words = "teacher_softcap and teacher_logit_scale must not be given with log-probabilities"
        check(op, plain_side, words)
    return labels, head, d


def _run(op, hidden, weight, labels, head: HeadOptions, d: Divergence):
    """Check the arguments, then run the kernel or the reference."""
    arguments.check_float(op, "hidden", hidden)
    labels, head, d = check_options(op, hidden.shape[:-1], hidden.device, labels, head, d)
    operands.check_head(op, hidden, weight, labels, head)
    operands.check_token_weight(op, d.token_weight, labels)
    TrainedCalls.count(hidden, weight)
    if top_k.is_top_k(d.teacher):
        hidden = operands.autocast(hidden)
        log_prob = functools.partial(linear_log_prob, hidden, weight)
        return d.results(*top_k.top_k_loss(op, log_prob, hidden.dtype, weight.shape[0], labels, head, d))
    teacher = _check_teacher(op, d.teacher, hidden, weight.shape[0])
    hidden = operands.autocast(hidden)
    parts = operands.float_parts(head, labels=labels, token_weight=d.token_weight)
    parts |= {"teacher": teacher.states, "teacher_weight": teacher.weight, "teacher_bias": teacher.bias}
    if teacher.weight is not None:
        teacher = teacher._replace(states=operands.autocast(teacher.states))
    weight = operands.plain_weight(op, weight)
    columns = teacher.states.shape[-1] if teacher.weight is None else teacher.weight.shape[0]
    classes = min(weight.shape[0], columns)
    if not has_kernel(op, hidden=hidden, beside=parts):
        operands.check_plain(op, classes, labels, head)
        return reference(hidden, weight, teacher, labels, head, d)
    return _run_kernel(op, hidden, weight, teacher, labels, head, d, classes)


def _run_kernel(op, hidden, weight, teacher: _Teacher, labels, head: HeadOptions, d: Divergence, classes):
    """Run the kernel on checked arguments; `classes`: those that both sides have."""
    states, teacher_weight, teacher_bias = teacher
    if states.dtype not in KERNEL_DTYPES:
        states = states.float()
    if teacher_weight is not None:
        states, teacher_weight, _ = operands.whole_vectors(states, teacher_weight.to(states.dtype))
        teacher_bias = None if teacher_bias is None else teacher_bias.float()
    if head.bias is not None:
        head = head._replace(bias=head.bias.float())
    sides = {"teacher": states, "teacher_weight": teacher_weight, "teacher_bias": teacher_bias}
    own = _loss.own(**sides, **_own_numbers(d, classes), **operands.divisors(d.denominator, hidden.device))
    call, parameters = operands.native_call(
        op, hidden, weight, labels, head, token_weight=d.token_weight, own=own
    )
    size = 0 if teacher_weight is None else states.shape[-1]
    sizes, planner = Sizes(per_row=own.reduction == 0), Planner("tigon_linear_divergence_plan", (size,))
    call = operands.within_peak(op, call, head, sizes, weight, planner=planner)
    loss, numbers = _loss.run(call, parameters, scalar=own.reduction != 0)
    names = [name for name in NUMBERS if name in d.outputs]
    results = {name: numbers[i].view(labels.shape) for i, name in enumerate(names)}
    return d.results(loss if own.reduction else loss.view(labels.shape), results)


def _own_numbers(d: Divergence, classes) -> dict[str, Any]:
    """The numbers that the operator takes of a divergence over so many classes."""
    reduction = "sum" if d.denominator is not None else d.reduction
    divided = classes if reduction == "mean" else 1
    return {
        "kind": _KINDS[d.kind],
        "beta": d.beta,
        "soft_weight": d.soft / divided,
        "hard_weight": d.hard / divided,
        "teacher_softcap": d.teacher_softcap or 0.0,
        "teacher_logit_scale": d.teacher_logit_scale,
        "reduction": _cross_entropy.REDUCTIONS[_REDUCTIONS[reduction]],
        "outputs": sum(bit for name, bit in NUMBERS.items() if name in d.outputs),
    }


@arguments.called(_WORDS)
def linear_kl_div(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor | tuple[torch.Tensor, ...],
    labels: torch.Tensor | None = None,
    *,
    reverse: bool = False,
    soft: float = 1.0,
    hard: float = 0.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    reduction: str = "batchmean",
    outputs: tuple[str, ...] = ("loss",),
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    token_weight: torch.Tensor | None = None,
    denominator: float | torch.Tensor | None = None,
    shift: int | bool = False,
    position_ids: torch.Tensor | None = None,
    valid_rows: int | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_peak_mb: float | None = None,
) -> torch.Tensor | NamedTuple:
    """``KL(teacher || student)`` of the distributions of two linear heads, without storing the full logits.

    Each side computes ``z = softcap * tanh(logit_scale * logit / softcap) / temperature`` (without softcap:
    ``logit_scale * logit / temperature``) in float32. The matmuls' results are not rounded to 16 bits, since
    a student close to its teacher needs the precision. A row's loss is ``soft * divergence + hard *
    cross_entropy``; the cross-entropy uses temperature 1. The gradients of a scalar loss are computed in the
    same pass: three matmuls of the student and one of the teacher in all.

    Args:
        hidden, weight: the student's, as in :func:`tigon.linear_cross_entropy`.
        teacher: ``(hidden, weight)`` or ``(hidden, weight, bias)`` of the teacher, ``[..., H_t]``, ``[V_t,
            H_t]``, ``[V_t]``, whose dtype may differ from the student's; or its logits ``[..., V_t]``. It
            never gets a gradient. If ``V_t`` differs from ``V`` (padding), only the first ``min(V, V_t)``
            classes are used: the others are outside both softmaxes and have gradient 0. Or ``(indices,
            log_prob)``, integers and floats ``[..., K]``: the log-probabilities (at `temperature`) of K
            different classes, such as the teacher's most likely. The mass of all other classes forms one
            more class on each side (at least 1e-7). An entry of ``-inf`` is not a candidate. This form uses
            :func:`tigon.linear_log_prob` and its memory: four matmuls and none of a teacher. A separate call
            computes the labels' cross-entropy.
        labels: ``[...]`` int64 class indices or ``ignore_index``. ``None``: every row counts.
        reverse: compute ``KL(student || teacher)`` instead.
        soft, hard: >= 0, weights of the divergence and of the labels' cross-entropy.
        temperature: > 0, divides both sides' z (the loss is not multiplied by its square).
        softcap, teacher_softcap: > 0 or ``None``.
        logit_scale, teacher_logit_scale: factors of the logits before softcap.
        bias: ``[V]`` of the student or ``None``, added in float32.
        lora: ``(A, B, scale)`` of the student's head. ``hidden @ A.T`` is rounded to hidden's dtype, as in a
            separate LoRA module.
        reduction: ``"batchmean"`` (over the rows that count), ``"mean"`` (over their elements, as in
            PyTorch), ``"sum"``, or ``"none"``: ``[...]`` losses, whose backward computes the logits again.
        token_weight, denominator, ignore_index, shift, position_ids, valid_rows, chunk_rows: as in
            :func:`tigon.linear_cross_entropy`. token_weight does not change the divisor of a mean.
        max_peak_mb: as in :func:`tigon.linear_cross_entropy`, but only by smaller chunks: the weight's
            gradient is summed in float32.
        outputs: ``("loss",)`` returns only the loss. With any of ``"soft"``, ``"hard"`` (a row's terms,
            without their weights) and ``"entropy"`` (of the student at `temperature`) the call returns a
            named tuple: float32 ``[...]``, detached, 0 on ignored rows.

    Returns:
        float32 scalar, or ``[...]`` for ``"none"``; with more ``outputs`` a named tuple. It is differentiable
        in hidden, weight, bias, A and B; each gradient is computed only if needed. It is bitwise
        deterministic. If every row is ignored, the loss is NaN for a mean and 0 otherwise; gradients are
        zero.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit; on the CPU also a label outside the
            classes of both. On CUDA such a label makes that row NaN if `hard` is not 0.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (arXiv:1503.02531).
    """
    arguments.check_booleans("linear_kl_div", reverse=reverse)
    kind = "reverse_kl" if reverse else "forward_kl"
    logits = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    rows = {"ignore_index": ignore_index, "shift": shift, "position_ids": position_ids}
    limits = {"valid_rows": valid_rows, "chunk_rows": chunk_rows, "max_peak_mb": max_peak_mb}
    head = HeadOptions(**logits, **rows, **limits, lora=lora)
    sums = {"soft": soft, "hard": hard, "token_weight": token_weight, "denominator": denominator}
    side = {"teacher_softcap": teacher_softcap, "teacher_logit_scale": teacher_logit_scale}
    loss = Divergence(teacher, kind, **sums, **side, reduction=reduction, outputs=outputs)
    return _run("linear_kl_div", hidden, weight, labels, head, loss)


@arguments.called(_WORDS)
def linear_jsd(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor | tuple[torch.Tensor, ...],
    labels: torch.Tensor | None = None,
    *,
    beta: float = 0.5,
    soft: float = 1.0,
    hard: float = 0.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    reduction: str = "batchmean",
    outputs: tuple[str, ...] = ("loss",),
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    token_weight: torch.Tensor | None = None,
    denominator: float | torch.Tensor | None = None,
    shift: int | bool = False,
    position_ids: torch.Tensor | None = None,
    valid_rows: int | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_peak_mb: float | None = None,
) -> torch.Tensor | NamedTuple:
    """Generalised Jensen-Shannon divergence of two linear heads, without storing the full logits.

    With the teacher's distribution ``T``, the student's ``S`` and ``M = beta T + (1 - beta) S`` the
    divergence is ``beta KL(T || M) + (1 - beta) KL(S || M)``. As in :func:`tigon.jsd`, ``beta = 0`` is
    ``KL(T || S)`` and ``beta = 1`` is ``KL(S || T)``.

    Arguments, results and errors are those of :func:`tigon.linear_kl_div`; beta is in [0, 1].

    Source: Lin 1991, "Divergence Measures Based on the Shannon Entropy", eq. 4.1; Agarwal et al. 2024,
    "On-Policy Distillation of Language Models" (arXiv:2306.13649).
    """
    kind = _divergence.jsd_kind("linear_jsd", beta)
    logits = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    rows = {"ignore_index": ignore_index, "shift": shift, "position_ids": position_ids}
    limits = {"valid_rows": valid_rows, "chunk_rows": chunk_rows, "max_peak_mb": max_peak_mb}
    head = HeadOptions(**logits, **rows, **limits, lora=lora)
    sums = {"soft": soft, "hard": hard, "token_weight": token_weight, "denominator": denominator}
    side = {"teacher_softcap": teacher_softcap, "teacher_logit_scale": teacher_logit_scale}
    loss = Divergence(teacher, kind, beta, **sums, **side, reduction=reduction, outputs=outputs)
    return _run("linear_jsd", hidden, weight, labels, head, loss)


@arguments.called(_WORDS)
def linear_tvd(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor | tuple[torch.Tensor, ...],
    labels: torch.Tensor | None = None,
    *,
    soft: float = 1.0,
    hard: float = 0.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    reduction: str = "batchmean",
    outputs: tuple[str, ...] = ("loss",),
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    token_weight: torch.Tensor | None = None,
    denominator: float | torch.Tensor | None = None,
    shift: int | bool = False,
    position_ids: torch.Tensor | None = None,
    valid_rows: int | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_peak_mb: float | None = None,
) -> torch.Tensor | NamedTuple:
    """Total variation distance ``1/2 sum |T - S|`` of two linear heads, without storing the full logits.

    The derivative of ``|T - S|`` is 0 if ``T = S``. Arguments, results and errors are those of
    :func:`tigon.linear_kl_div`.
    """
    logits = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    rows = {"ignore_index": ignore_index, "shift": shift, "position_ids": position_ids}
    limits = {"valid_rows": valid_rows, "chunk_rows": chunk_rows, "max_peak_mb": max_peak_mb}
    head = HeadOptions(**logits, **rows, **limits, lora=lora)
    sums = {"soft": soft, "hard": hard, "token_weight": token_weight, "denominator": denominator}
    side = {"teacher_softcap": teacher_softcap, "teacher_logit_scale": teacher_logit_scale}
    loss = Divergence(teacher, "tvd", **sums, **side, reduction=reduction, outputs=outputs)
    return _run("linear_tvd", hidden, weight, labels, head, loss)
