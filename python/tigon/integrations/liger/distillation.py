"""``liger_kernel``'s divergences from hidden states: functions, classes and what their ``apply`` takes.

Both heads' logits are float32, and weight gradients are summed in float32 whatever ``accum_dtype`` says.
"""

from __future__ import annotations

import torch
from torch import nn

import tigon
from tigon.integrations.liger.missing import function_class


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


class LigerFusedLinearJSD(nn.Module):
    """:func:`liger_fused_linear_jsd` with its options fixed."""

    def __init__(self, jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None):
        super().__init__()
        assert temperature != 0, "temperature cannot be 0."
        self.jsd_beta, self.ignore_index = jsd_beta, ignore_index
        self.temperature, self.accum_dtype = temperature, accum_dtype

    def forward(self, student_input, student_weight, teacher_input, teacher_weight, shift_labels=None):
        """Hidden states ``[BT, H]`` and weights ``[V, H]`` of both, labels ``[BT]`` or None."""
        return liger_fused_linear_jsd(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, self.jsd_beta,
            self.ignore_index, self.temperature,
        )  # fmt: skip


class LigerFusedLinearKLDivLoss(nn.Module):
    """:func:`liger_fused_linear_kl_div` with its options fixed."""

    def __init__(
        self, reduction="batchmean", ignore_index=-100, temperature=1.0, eps=1e-10, accum_dtype=None
    ):
        super().__init__()
        assert temperature != 0, "temperature cannot be 0."
        self.reduction, self.ignore_index, self.temperature = reduction, ignore_index, temperature
        self.eps, self.accum_dtype = eps, accum_dtype

    def forward(self, student_input, student_weight, target, shift_labels=None):
        """Hidden states ``[BT, H]``, weight ``[V, H]``, probabilities ``[BT, V]``, labels ``[BT]``."""
        return liger_fused_linear_kl_div(
            student_input, student_weight, target, shift_labels, self.reduction, self.ignore_index,
            self.temperature, self.eps,
        )  # fmt: skip

    def extra_repr(self):
        return (
            f"reduction={self.reduction}, ignore_index={self.ignore_index}, "
            f"temperature={self.temperature}, eps={self.eps}, accum_dtype={self.accum_dtype}"
        )


LigerFusedLinearJSDFunction = function_class(
    "LigerFusedLinearJSDFunction",
    lambda student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5,
    ignore_index=-100, temperature=1.0, accum_dtype=None, jsd_impl=None, jsd_mode=None: (
        liger_fused_linear_jsd(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta,
            ignore_index, temperature,
        )
    ),
    "Jensen-Shannon divergence of two heads.",
)  # fmt: skip
LigerFusedLinearKLDivFunction = function_class(
    "LigerFusedLinearKLDivFunction", liger_fused_linear_kl_div, "KL divergence of a head from probabilities."
)
