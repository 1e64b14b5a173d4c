"""``liger_kernel``'s divergences, functions and classes, by Tigon's.

As in Liger, losses are computed in float32, and only the student gets a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tigon
from tigon.integrations.liger.modules import Loss
from tigon.integrations.liger.paths import check

_REDUCTIONS = ("none", "sum", "mean", "batchmean")


def _or_zero(loss, labels, ignore_index):
    """The loss, or 0 if no row counts, for which Tigon's mean is NaN."""
    return loss if labels is None else torch.where((labels != ignore_index).any(), loss, 0.0)


def liger_jsd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> Tensor:
    """Jensen-Shannon of log-probabilities, by :func:`tigon.jsd`; ``input`` is the student's, in its dtype."""
    target = target.to(input.dtype).detach()
    loss = tigon.jsd(input, target, shift_labels, beta=beta, log_probs=True, ignore_index=ignore_index)
    return _or_zero(loss, shift_labels, ignore_index).to(input.dtype)


def liger_kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """``target * (log max(target, eps) - input)``, of log-probabilities ``input``.

    Reduced ones run :func:`tigon.kl_div`: a probability of zero adds nothing there whatever ``eps`` is. One
    value for every element (``"none"``) is as large as the logits, so it is plain PyTorch.
    """
    check(reduction in _REDUCTIONS, f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
    target = target.detach().float()
    if reduction != "none":
        teacher = target if log_target else torch.where(target > 0, target.clamp(min=eps), target).log()
        return tigon.kl_div(input.float(), teacher, log_probs=True, reduction=reduction)
    if log_target:
        return target.exp() * (target - input.float())
    return target * (target.clamp(min=eps).log() - input.float())


def liger_tvd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """``|input - target| / 2`` of probabilities; the gradient is 0 if they are equal.

    :func:`tigon.tvd` takes logits and is the one to use in new code: with probabilities given there is
    nothing left to fuse but a difference, so this is plain PyTorch.
    """
    check(reduction in _REDUCTIONS, f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
    terms = (input.float() - target.detach().float()).abs() / 2
    rows = input.numel() // input.shape[-1]
    if shift_labels is not None:
        kept = shift_labels != ignore_index
        terms, rows = torch.where(kept.unsqueeze(-1), terms, 0.0), kept.sum()
    if reduction == "none":
        return terms
    return terms.sum() / {"sum": 1, "batchmean": rows, "mean": rows * input.shape[-1]}[reduction]


@dataclass(eq=False, repr=False)
class LigerJSD(Loss):
    """Jensen-Shannon divergence: ``beta`` 0 is ``KL(teacher || student)``, 1 the other way round."""

    beta: float = 0.5
    ignore_index: int = -100

    def forward(self, log_q, log_p, shift_labels=None):
        return liger_jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)


@dataclass(eq=False, repr=False)
class LigerTVDLoss(Loss):
    """Total variation distance of probabilities; the gradient is that of ``p``."""

    reduction: str = "batchmean"
    ignore_index: int = -100

    def forward(self, p, q, shift_labels=None):
        return liger_tvd(p, q, shift_labels, self.reduction, self.ignore_index)


class LigerKLDIVLoss(nn.KLDivLoss):
    """``torch.nn.KLDivLoss`` with an ``eps`` before its arguments."""

    def __init__(self, eps: float = 1e-10, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred, y_true):
        """Log-probabilities, and probabilities (or logs of them, with ``log_target``)."""
        options = {"reduction": self.reduction, "log_target": self.log_target, "eps": self.eps}
        return liger_kl_div(y_pred, y_true, **options)


def _check_labels(labels, rows):
    shape = None if labels is None else tuple(labels.shape)
    assert shape in (None, (rows,)), f"the shape of shift_labels must be (BT,). Got: {labels.shape}"


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """Jensen-Shannon divergence of two heads, a mean of the rows that count: :func:`tigon.linear_jsd`."""
    _check_labels(shift_labels, teacher_input.shape[0])
    loss = tigon.linear_jsd(
        student_input,
        student_weight,
        (teacher_input, teacher_weight),
        shift_labels,
        beta=jsd_beta,
        temperature=temperature,
        ignore_index=ignore_index,
    )
    return _or_zero(loss, shift_labels, ignore_index)


@dataclass(eq=False, repr=False)
class LigerFusedLinearJSD(Loss):
    """:func:`liger_fused_linear_jsd` with its options fixed."""

    jsd_beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    accum_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        assert self.temperature != 0, "temperature cannot be 0."

    def forward(self, student_input, student_weight, teacher_input, teacher_weight, shift_labels=None):
        operands = (student_input, student_weight, teacher_input, teacher_weight, shift_labels)
        return liger_fused_linear_jsd(*operands, **self.options())
