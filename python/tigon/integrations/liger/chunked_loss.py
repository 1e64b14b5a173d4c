"""``liger_kernel.chunked_loss``: its distillation losses, by Tigon's.

``LigerFusedLinearJSDFunction`` and ``liger_fused_linear_jsd`` are these below that package, others outside.

``compiled`` and ``chunk_size`` are accepted and have no effect. Where the teacher has more classes than the
student, those that both have are compared (Liger pads the student's logits with zeros).
"""

from __future__ import annotations

from torch import nn

import tigon
from tigon.integrations.liger.missing import function_class


def liger_fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, true_labels,
                           student_bias=None, teacher_bias=None, weight_hard_loss: float = 0.5,
                           weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100,
                           temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024,
                           return_soft_hard_loss: bool = False):  # fmt: skip
    """``weight_hard_loss * CE + weight_soft_loss * JSD``, the latter at `temperature`, by
    :func:`tigon.linear_jsd`: sums over the number of rows that count, at least 1.

    Returns the loss, or (loss, soft, hard) with ``return_soft_hard_loss``.
    """
    count = (true_labels != ignore_index).sum().clamp(min=1)
    biases = () if teacher_bias is None else (teacher_bias,)
    outputs = ("loss", "soft", "hard") if return_soft_hard_loss else ("loss",)
    found = tigon.linear_jsd(
        student_input, student_weight, (teacher_input, teacher_weight, *biases), true_labels, beta=beta,
        soft=weight_soft_loss, hard=weight_hard_loss, temperature=temperature, bias=student_bias,
        denominator=count, ignore_index=ignore_index, outputs=outputs,
    )  # fmt: skip
    if not return_soft_hard_loss:
        return found
    return found.loss, found.soft.sum() / count, found.hard.sum() / count


LigerFusedLinearJSDFunction = function_class(
    "LigerFusedLinearJSDFunction", liger_fused_linear_jsd, "Jensen-Shannon distillation of two heads."
)


class LigerFusedLinearJSDLoss(nn.Module):
    """:func:`liger_fused_linear_jsd` with its options fixed."""

    def __init__(self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5,
                 ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True,
                 chunk_size: int = 1024, return_soft_hard_loss: bool = False):  # fmt: skip
        super().__init__()
        assert temperature != 0, "Temperature cannot be 0."
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature, self.compiled = ignore_index, temperature, compiled
        self.chunk_size, self.return_soft_hard_loss = chunk_size, return_soft_hard_loss

    def forward(self, student_input, student_weight, teacher_input, teacher_weight, true_labels,
                student_bias=None, teacher_bias=None):  # fmt: skip
        """Hidden states ``[BT, H]`` and weights ``[V, H]`` of both, labels ``[BT]``."""
        return LigerFusedLinearJSDFunction.apply(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias,
            teacher_bias, self.weight_hard_loss, self.weight_soft_loss, self.beta, self.ignore_index,
            self.temperature, self.compiled, self.chunk_size, self.return_soft_hard_loss,
        )  # fmt: skip
