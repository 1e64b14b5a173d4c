"""Divergences of two heads as modules."""

from __future__ import annotations

import torch
from torch import nn

from tigon.ops.loss_head.linear_divergence import linear_jsd, linear_kl_div, linear_tvd


class _LinearDivergenceLoss(nn.Module):
    """A divergence of two heads with its options fixed; the heads' weights stay with their models."""

    function = staticmethod(linear_kl_div)

    def __init__(
        self,
        own: dict,
        *,
        soft: float = 1.0,
        hard: float = 0.0,
        temperature: float = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        teacher_logit_scale: float = 1.0,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        shift: int | bool = False,
        chunk_rows: int | None = None,
        outputs: tuple[str, ...] = ("loss",),
    ) -> None:
        super().__init__()
        self.options = {
            "soft": soft,
            "hard": hard,
            "temperature": temperature,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "teacher_softcap": teacher_softcap,
            "teacher_logit_scale": teacher_logit_scale,
            "reduction": reduction,
            "ignore_index": ignore_index,
            "shift": shift,
            "chunk_rows": chunk_rows,
            "outputs": outputs,
            **own,
        }

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher: torch.Tensor | tuple[torch.Tensor, ...],
        labels: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        denominator: float | torch.Tensor | None = None,
        token_weight: torch.Tensor | None = None,
        valid_rows: int | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        per_call = {"denominator": denominator, "token_weight": token_weight, "valid_rows": valid_rows}
        per_call["position_ids"] = position_ids
        return self.function(hidden, weight, teacher, labels, bias=bias, **per_call, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items())


class LinearKLDivLoss(_LinearDivergenceLoss):
    """:func:`tigon.linear_kl_div` with its options fixed; the heads' weights stay with their models.

    Args: as :func:`tigon.linear_kl_div`.

    Shape: hidden ``[..., H]``, weight ``[V, H]``, teacher ``([..., H_t], [V_t, H_t])`` or ``[..., V_t]``,
    labels ``[...]`` or ``None`` -> scalar, or ``[...]`` with ``reduction="none"``.
    """

    def __init__(self, *, reverse: bool = False, **options) -> None:
        super().__init__({"reverse": reverse}, **options)


class LinearJSDLoss(_LinearDivergenceLoss):
    """:func:`tigon.linear_jsd` with its options fixed: as :class:`LinearKLDivLoss`."""

    function = staticmethod(linear_jsd)

    def __init__(self, *, beta: float = 0.5, **options) -> None:
        super().__init__({"beta": beta}, **options)


class LinearTVDLoss(_LinearDivergenceLoss):
    """:func:`tigon.linear_tvd` with its options fixed: as :class:`LinearKLDivLoss`."""

    function = staticmethod(linear_tvd)

    def __init__(self, **options) -> None:
        super().__init__({}, **options)
