"""KL, Jensen-Shannon, total variation. Contract: ``csrc/tigon/ops/divergence/divergence.h``."""

from __future__ import annotations

import torch

from tigon._op import has_kernel
from tigon.error import check
from tigon.ops import arguments
from tigon.ops.cross_entropy import check_target
from tigon.ops.in_place import check_apart
from tigon.ops.loss_gradient import RowLoss

_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2, "tvd": 3}
_REDUCTIONS = {"none": 0, "sum": 1, "batchmean": 2, "mean": 3}


def reference(
    student,
    teacher,
    labels=None,
    *,
    kind="forward_kl",
    beta=0.5,
    temperature=1.0,
    log_probs=False,
    ignore_index=-100,
    reduction="batchmean",
):
    """Compute the same formulas with PyTorch operations (any float dtype, any device)."""
    wide = torch.promote_types(student.dtype, torch.float32)
    lq, lp = student.to(wide), teacher.to(wide)
    if not log_probs:
        lq, lp = (torch.log_softmax(x / temperature, dim=-1) for x in (lq, lp))
    q, p = lq.exp(), lp.exp()

    def weighted(weight, log_ratio):  # 0 log 0 = 0, and so is its gradient
        return weight * torch.where(weight == 0, 0.0, log_ratio)

    if kind == "forward_kl":
        terms = weighted(p, lp - lq)
    elif kind == "reverse_kl":
        terms = weighted(q, lq - lp)
    elif kind == "jsd":
        m = beta * p + (1 - beta) * q
        lm = torch.where(m == 0, 1.0, m).log()
        terms = beta * weighted(p, lp - lm) + (1 - beta) * weighted(q, lq - lm)
    else:
        terms = (q - p).abs() / 2
    rows = terms.sum(-1)
    count = rows.numel()
    if labels is not None:
        kept = labels != ignore_index
        rows, count = torch.where(kept, rows, 0.0), kept.sum()
    if reduction == "none":
        return rows
    return rows.sum() / {"sum": 1, "batchmean": count, "mean": count * student.shape[-1]}[reduction]


_loss = RowLoss("divergence", reduction=3)


def divergence(
    op,
    kind,
    student,
    teacher,
    labels,
    beta,
    temperature=1.0,
    log_probs=False,
    ignore_index=-100,
    reduction="batchmean",
    inplace=False,
):
    """Check the arguments, then run the kernel or the reference."""
    arguments.check_float(op, "student", student)
    arguments.check_float(op, "teacher", teacher)
    check(op, student.dim() >= 1, "student must have at least one dimension, got 0")
    check(op, student.shape[-1] >= 1, "student must have at least one column, got {}", student.shape)
    check(op, teacher.shape == student.shape, "teacher must be {}, got {}", student.shape, teacher.shape)
    check(op, teacher.dtype == student.dtype, "teacher must be {}, got {}", student.dtype, teacher.dtype)
    need_grad = torch.is_grad_enabled() and student.requires_grad
    constant = not (teacher.requires_grad and torch.is_grad_enabled())
    check(op, constant, "teacher must not require grad (it gets no gradient), got a tensor that does")
    arguments.check_positive(op, "temperature", temperature)
    arguments.check_integers(op, ignore_index=ignore_index)
    arguments.check_booleans(op, log_probs=log_probs, inplace=inplace)
    check(op, not log_probs or temperature == 1, "temperature must be 1 with log_probs, got {}", temperature)
    arguments.check_choice(op, "reduction", reduction, _REDUCTIONS)
    check(
        op,
        not (inplace and need_grad and student.is_leaf),
        "student must not be a leaf that requires grad with inplace=True, got a leaf",
    )
    if labels is not None:
        check_target(op, "labels", labels, student.shape[:-1])
    if not has_kernel(op, student=student, beside={"teacher": teacher, "labels": labels}):
        return reference(
            student,
            teacher,
            labels,
            kind=kind,
            beta=beta,
            temperature=temperature,
            log_probs=log_probs,
            ignore_index=ignore_index,
            reduction=reduction,
        )
    if inplace and need_grad and reduction != "none":
        check_apart(op, "student", student, "teacher", teacher)
    labels = None if labels is None else labels.reshape(-1).long()
    options = (_KINDS[kind], beta, temperature, log_probs, ignore_index)
    inputs = (student, teacher, labels, _REDUCTIONS[reduction], *options)
    loss = _loss(*inputs, inplace=inplace)
    return loss.view(student.shape[:-1]) if reduction == "none" else loss


@arguments.called()
def kl_div(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    log_probs: bool = False,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    inplace: bool = False,
) -> torch.Tensor:
    """Kullback-Leibler divergence of softmaxes over the last dimension, ``KL(teacher || student)``.

    Args:
        student: ``[..., V]`` logits, float32, bfloat16 or float16 (float64 runs the eager reference), any
            leading strides (rows dense, or copied once).
        teacher: logits of the same shape, dtype and device; gets no gradient.
        labels: ``[...]`` integers or ``None``: rows labelled ``ignore_index`` do not count (loss and gradient
            are 0, whatever their logits are). The call does not shift labels.
        reverse: compute ``KL(student || teacher)`` instead.
        temperature: divides both logits (the loss is not multiplied by its square).
        log_probs: the inputs are log-probabilities and used without a softmax; the gradient is that of the
            log-probabilities.
        reduction: ``"batchmean"`` (over the rows that count), ``"mean"`` (over their elements, as in
            PyTorch), ``"sum"``, or ``"none"`` for one loss a row.
        inplace: as in :func:`tigon.cross_entropy`, for the student.

    Returns:
        float32 scalar, or ``[...]`` for ``"none"``, as :func:`tigon.cross_entropy`; differentiable in
        student. A class that one side excludes (``-inf``) adds ``0 log 0 = 0``. If every row is ignored, a
        mean is NaN and the gradient is zero. A scalar loss takes two reads and one write in all.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit.

    Source: Kullback & Leibler 1951, "On Information and Sufficiency"; distillation: Hinton et al. 2015.
    """
    arguments.check_booleans("kl_div", reverse=reverse)
    kind = "reverse_kl" if reverse else "forward_kl"
    options = temperature, log_probs, ignore_index, reduction, inplace
    return divergence("kl_div", kind, student, teacher, labels, 0.5, *options)


def jsd_kind(op, beta) -> str:
    """Check beta, and return the divergence that it selects."""
    arguments.check_numbers(op, beta=beta)
    check(op, 0.0 <= beta <= 1.0, "beta must be in [0, 1], got {}", beta)
    return "forward_kl" if beta == 0.0 else "reverse_kl" if beta == 1.0 else "jsd"


@arguments.called()
def jsd(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    log_probs: bool = False,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    inplace: bool = False,
) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence ``beta KL(P || M) + (1 - beta) KL(Q || M)``.

    ``P`` is the teacher's softmax, ``Q`` the student's, and ``M = beta P + (1 - beta) Q``. By convention
    (Agarwal et al. 2024) ``beta = 0`` is ``KL(P || Q)`` and ``beta = 1`` is ``KL(Q || P)``: the limits of the
    divergence divided by ``beta`` and by ``1 - beta``. Neither underflow nor a class at ``-inf`` makes a NaN.

    Near the limits the two terms cancel in float32. The relative error of the loss is up to about ``3e-9 /
    min(beta, 1 - beta)``, that of the gradient ``3e-8 / beta`` (PyTorch operations in float32: four times as
    much).

    Arguments, results and errors are those of :func:`kl_div`; beta is in [0, 1].

    Source: Lin 1991, "Divergence Measures Based on the Shannon Entropy", eq. 4.1; Agarwal et al. 2024,
    "On-Policy Distillation of Language Models".
    """
    options = temperature, log_probs, ignore_index, reduction, inplace
    return divergence("jsd", jsd_kind("jsd", beta), student, teacher, labels, beta, *options)


@arguments.called()
def tvd(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    log_probs: bool = False,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    inplace: bool = False,
) -> torch.Tensor:
    """Total variation distance of softmaxes, ``1/2 sum |P - Q|``.

    The derivative of ``|P - Q|`` is 0 if ``P = Q``. Arguments, results and errors are those of
    :func:`kl_div`.
    """
    options = temperature, log_probs, ignore_index, reduction, inplace
    return divergence("tvd", "tvd", student, teacher, labels, 0.5, *options)
