"""``liger_kernel``'s divergences, by Tigon's.

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


@dataclass(eq=False, repr=False)
class LigerJSD(Loss):
    """Jensen-Shannon divergence of log-probabilities, by :func:`tigon.jsd`, in the student's dtype.

    ``beta`` 0 is ``KL(teacher || student)``, 1 the other way round.
    """

    beta: float = 0.5
    ignore_index: int = -100

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        teacher, options = log_p.to(log_q.dtype).detach(), self.options()
        loss = tigon.jsd(log_q, teacher, shift_labels, log_probs=True, **options)
        return _or_zero(loss, shift_labels, self.ignore_index).to(log_q.dtype)


@dataclass(eq=False, repr=False)
class LigerTVDLoss(Loss):
    """``|p - q| / 2`` of probabilities; the gradient is that of ``p``, and 0 where they are equal.

    :func:`tigon.tvd` takes logits and is the one to use in new code: with probabilities given there is
    nothing left to fuse but a difference, so this is plain PyTorch.
    """

    reduction: str = "batchmean"
    ignore_index: int = -100

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        known = self.reduction in _REDUCTIONS
        check(known, "reduction must be one of {}, got {!r}", _REDUCTIONS, self.reduction)
        terms = (p.float() - q.detach().float()).abs() / 2
        rows = p.numel() // p.shape[-1]
        if shift_labels is not None:
            kept = shift_labels != self.ignore_index
            terms, rows = torch.where(kept.unsqueeze(-1), terms, 0.0), kept.sum()
        if self.reduction == "none":
            return terms
        return terms.sum() / {"sum": 1, "batchmean": rows, "mean": rows * p.shape[-1]}[self.reduction]


class LigerKLDIVLoss(nn.KLDivLoss):
    """``torch.nn.KLDivLoss`` of ``target * (log max(target, eps) - input)``.

    Reduced ones run :func:`tigon.kl_div`. One value for every element (``"none"``) is as large as the logits,
    so it is plain PyTorch, and so is an ``eps`` above 1e-6.
    """

    def __init__(self, eps: float = 1e-10, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """Log-probabilities, and probabilities (or logs of them, with ``log_target``)."""
        student, target = y_pred.float(), y_true.detach().float()
        if self.reduction != "none" and (self.log_target or self.eps <= 1e-6):
            teacher = target if self.log_target else target.log()
            return tigon.kl_div(student, teacher, log_probs=True, reduction=self.reduction)
        if self.log_target:
            return target.exp() * (target - student)
        terms = target * (target.clamp(min=self.eps).log() - student)
        rows = {"none": None, "sum": 1, "mean": terms.numel(), "batchmean": terms.shape[0]}[self.reduction]
        return terms if rows is None else terms.sum() / rows


@dataclass(eq=False, repr=False)
class LigerFusedLinearJSD(Loss):
    """Jensen-Shannon divergence of two heads, a mean of the rows that count: :func:`tigon.linear_jsd`."""

    jsd_beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    accum_dtype: torch.dtype | None = None

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        loss = tigon.linear_jsd(
            student_input,
            student_weight,
            (teacher_input, teacher_weight),
            shift_labels,
            beta=self.jsd_beta,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
        )
        return _or_zero(loss, shift_labels, self.ignore_index)
