"""The fused loss head as a module."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.loss_head.linear_cross_entropy import linear_cross_entropy


class LinearCrossEntropyLoss(nn.Module):
    """:func:`tigon.linear_cross_entropy` with its options fixed; the head's weight stays with the model.

    Args: as :func:`tigon.linear_cross_entropy`.

    Shape: hidden ``[..., H]``, weight ``[V, H]``, target ``[...]`` -> scalar, or ``[...]`` with
    ``reduction="none"``.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        class_weight: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: float = 1.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
        shift: int | bool = False,
        chunk_rows: int | None = None,
        max_workspace_mb: float | None = None,
        outputs: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("class_weight", class_weight)
        self.options = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "temperature": temperature,
            "z_loss": z_loss,
            "reduction": reduction,
            "shift": shift,
            "chunk_rows": chunk_rows,
            "max_workspace_mb": max_workspace_mb,
            "outputs": outputs,
        }

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        denominator: float | torch.Tensor | None = None,
        token_weight: torch.Tensor | None = None,
        valid_rows: int | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        per_call = {"denominator": denominator, "token_weight": token_weight, "valid_rows": valid_rows}
        per_call["position_ids"] = position_ids
        return linear_cross_entropy(
            hidden, weight, target, bias=bias, class_weight=self.class_weight, **per_call, **self.options
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items())
