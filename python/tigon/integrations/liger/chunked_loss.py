"""``liger_kernel.chunked_loss``: its distillation losses, by Tigon's.

``LigerFusedLinearJSDFunction`` and ``liger_fused_linear_jsd`` are these below that package, others outside.

``compiled`` and ``chunk_size`` are accepted and have no effect. Where the teacher has more classes than the
student, those that both have are compared (Liger pads the student's logits with zeros).
"""

from __future__ import annotations

import torch.nn.functional as F

import tigon
from tigon.integrations.liger.bases import LigerFusedLinearDistillationBase
from tigon.integrations.liger.signatures import Loss, function_class


def liger_fused_linear_jsd(
    student_input,
    student_weight,
    teacher_input,
    teacher_weight,
    true_labels,
    student_bias=None,
    teacher_bias=None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    compiled: bool = True,
    chunk_size: int = 1024,
    return_soft_hard_loss: bool = False,
):
    """``weight_hard_loss * CE + weight_soft_loss * JSD``, the latter at `temperature`, by
    :func:`tigon.linear_jsd`: sums over the number of rows that count, at least 1.

    Returns the loss, or (loss, soft, hard) with ``return_soft_hard_loss``.
    """
    count = (true_labels != ignore_index).sum().clamp(min=1)
    biases = () if teacher_bias is None else (teacher_bias,)
    outputs = ("loss", "soft", "hard") if return_soft_hard_loss else ("loss",)
    found = tigon.linear_jsd(
        student_input,
        student_weight,
        (teacher_input, teacher_weight, *biases),
        true_labels,
        beta=beta,
        soft=weight_soft_loss,
        hard=weight_hard_loss,
        temperature=temperature,
        bias=student_bias,
        denominator=count,
        ignore_index=ignore_index,
        outputs=outputs,
    )
    if not return_soft_hard_loss:
        return found
    return found.loss, found.soft.sum() / count, found.hard.sum() / count


LigerFusedLinearJSDFunction = function_class("LigerFusedLinearJSDFunction", liger_fused_linear_jsd)


class LigerFusedLinearCosineSimilarityFunction(LigerFusedLinearDistillationBase):
    """The autograd function; arguments as in :class:`LigerFusedLinearCosineSimilarityLoss`."""

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, beta=1.0):
        """The sum over rows that count of ``beta * (1 - cos)``."""
        loss = 1 - F.cosine_similarity(student_logits.float(), teacher_logits.float(), dim=-1)
        if target is not None and ignore_index is not None:
            loss = loss.masked_fill(target == ignore_index, 0.0)
        return beta * loss.sum()

    @classmethod
    def forward(
        cls,
        ctx,
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        true_labels,
        student_bias=None,
        teacher_bias=None,
        weight_hard_loss=0.5,
        weight_soft_loss=0.5,
        beta=0.5,
        ignore_index=-100,
        temperature=1.0,
        compiled=True,
        chunk_size=1024,
        return_soft_hard_loss=False,
    ):
        return super().forward(
            cls,
            ctx,
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            true_labels,
            student_bias,
            teacher_bias,
            chunk_size,
            ignore_index,
            weight_hard_loss,
            weight_soft_loss,
            beta,
            temperature=temperature,
            return_soft_hard_loss=return_soft_hard_loss,
        )

    @staticmethod
    def backward(ctx, grad_output, *args):
        return *LigerFusedLinearDistillationBase.backward(ctx, grad_output, *args), *[None] * 9


liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply


def _cosine(
    student_input,
    student_weight,
    teacher_input,
    teacher_weight,
    true_labels,
    student_bias,
    teacher_bias,
    weight_hard_loss=0.5,
    weight_soft_loss=0.5,
    beta=0.5,
    ignore_index=-100,
    temperature=1.0,
    compiled=True,
    chunk_size=1024,
    return_soft_hard_loss=False,
):
    return liger_fused_linear_cosine(*locals().values())


class _Distillation(Loss):
    def validate(self):
        assert self.temperature != 0, "Temperature cannot be 0."


_OPERANDS = (
    "student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, "
    "teacher_bias=None"
)


class LigerFusedLinearJSDLoss(_Distillation, target=liger_fused_linear_jsd, operands=_OPERANDS):
    """:func:`liger_fused_linear_jsd` with its options fixed."""


class LigerFusedLinearCosineSimilarityLoss(_Distillation, target=_cosine, operands=_OPERANDS):
    """:class:`LigerFusedLinearCosineSimilarityFunction` with its options fixed."""
