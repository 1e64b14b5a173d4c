"""``liger_kernel``'s cosine distillation: cross-entropy and ``beta * (1 - cos)`` of the logits of two models.

The logits of ``chunk_size`` rows exist at a time, in plain PyTorch.
"""

from __future__ import annotations

import torch.nn.functional as F

from tigon.integrations.liger.bases import LigerFusedLinearDistillationBase
from tigon.integrations.liger.chunked_loss import OPERANDS, OPTIONS, ChunkedDistillation


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
        cls, ctx, student_input, student_weight, teacher_input, teacher_weight, true_labels,
        student_bias=None, teacher_bias=None, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5,
        ignore_index=-100, temperature=1.0, compiled=True, chunk_size=1024, return_soft_hard_loss=False,
    ):  # fmt: skip
        return super().forward(
            cls, ctx, student_input, student_weight, teacher_input, teacher_weight, true_labels,
            student_bias, teacher_bias, chunk_size, ignore_index, weight_hard_loss, weight_soft_loss, beta,
            temperature=temperature, return_soft_hard_loss=return_soft_hard_loss,
        )  # fmt: skip

    @staticmethod
    def backward(ctx, grad_output, *args):
        return *LigerFusedLinearDistillationBase.backward(ctx, grad_output, *args), *[None] * 9


liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply


def _cosine(**arguments):
    return LigerFusedLinearCosineSimilarityFunction.apply(*arguments.values())


class LigerFusedLinearCosineSimilarityLoss(
    ChunkedDistillation, target=_cosine, options=OPTIONS, operands=OPERANDS
):
    """:class:`LigerFusedLinearCosineSimilarityFunction` with its options fixed."""
