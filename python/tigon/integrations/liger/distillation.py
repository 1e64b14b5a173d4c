"""``liger_kernel``'s divergences from hidden states: functions, classes and what their ``apply`` takes.

Both heads' logits are float32, and weight gradients are summed in float32 whatever ``accum_dtype`` says.
"""

from __future__ import annotations

import torch

import tigon
from tigon.integrations.liger.signatures import Loss, function_class


def _check_labels(labels, rows):
    shape = None if labels is None else tuple(labels.shape)
    assert shape in (None, (rows,)), f"the shape of shift_labels must be (BT,). Got: {labels.shape}"


def _or_zero(loss, labels, ignore_index):
    """Without a row that counts: nothing, where Tigon's mean is that of no numbers."""
    return loss if labels is None else torch.where((labels != ignore_index).any(), loss, 0.0)


def liger_fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, shift_labels=None,
                           jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
                           accum_dtype=None):  # fmt: skip
    """Jensen-Shannon divergence of two heads, a mean of the rows that count: :func:`tigon.linear_jsd`."""
    _check_labels(shift_labels, teacher_input.shape[0])
    loss = tigon.linear_jsd(
        student_input, student_weight, (teacher_input, teacher_weight), shift_labels, beta=jsd_beta,
        temperature=temperature, ignore_index=ignore_index,
    )  # fmt: skip
    return _or_zero(loss, shift_labels, ignore_index)


def liger_fused_linear_kl_div(student_input, student_weight, target, shift_labels=None,
                              reduction: str = "batchmean", ignore_index: int = -100,
                              temperature: float = 1.0, eps: float = 1e-10, accum_dtype=None):  # fmt: skip
    """``sum q (log max(q, eps) - log softmax(z))`` against probabilities q, by :func:`tigon.linear_kl_div`.

    A row of q need not add up to 1: its sum is the row's weight.
    """
    if reduction not in ("batchmean", "mean", "sum"):
        raise ValueError(
            f"reduction must be one of ('batchmean', 'mean', 'sum'), got {reduction!r}. "
            "reduction='none' is not supported by the fused kernel; "
            "use LigerKLDIVLoss for element-wise losses."
        )
    assert temperature != 0, "temperature cannot be 0."
    _check_labels(shift_labels, student_input.shape[0])
    with torch.no_grad():
        q = target.float()
        mass = q.sum(-1)
        teacher = q.log()
        # Tigon compares with q / mass, and gives 0 log 0 = 0 whatever eps is.
        constant = torch.where(mass > 0, mass * mass.log(), 0.0)
    loss = tigon.linear_kl_div(
        student_input, student_weight, teacher, shift_labels, temperature=temperature,
        teacher_logit_scale=temperature, token_weight=mass, reduction=reduction, ignore_index=ignore_index,
    )  # fmt: skip
    if shift_labels is not None:
        kept = shift_labels != ignore_index
        constant, count = torch.where(kept, constant, 0.0), kept.sum()
    else:
        count = constant.numel()
    columns = target.shape[-1]
    loss = loss + constant.sum() / {"sum": 1, "batchmean": count, "mean": count * columns}[reduction]
    return _or_zero(loss, shift_labels, ignore_index)


class _Distillation(Loss):
    def validate(self):
        assert self.temperature != 0, "temperature cannot be 0."


class LigerFusedLinearJSD(
    _Distillation,
    target=liger_fused_linear_jsd,
    operands="student_input, student_weight, teacher_input, teacher_weight, shift_labels=None",
):
    """:func:`liger_fused_linear_jsd` with its options fixed."""


class LigerFusedLinearKLDivLoss(
    _Distillation,
    target=liger_fused_linear_kl_div,
    operands="student_input, student_weight, target, shift_labels=None",
):
    """:func:`liger_fused_linear_kl_div` with its options fixed."""

    def extra_repr(self):
        return ", ".join(f"{name}={getattr(self, name)}" for name in self._options)


LigerFusedLinearJSDFunction = function_class(
    "LigerFusedLinearJSDFunction",
    liger_fused_linear_jsd,
    "student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, "
    "ignore_index=-100, temperature=1.0, accum_dtype=None, jsd_impl=None, jsd_mode=None",
)
LigerFusedLinearKLDivFunction = function_class("LigerFusedLinearKLDivFunction", liger_fused_linear_kl_div)
