"""Divergences of two heads as modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn

from tigon.ops.loss_head.linear_divergence import linear_jsd, linear_kl_div, linear_tvd

_PER_CALL = ("bias", "lora", "token_weight", "denominator", "valid_rows", "position_ids")


class _LinearDivergenceLoss(nn.Module):
    """A divergence of two heads with its options fixed; the heads' weights stay with their models."""

    function: Callable[..., torch.Tensor]

    def __init__(self, **options) -> None:
        super().__init__()
        known = inspect.signature(self.function).parameters.values()
        fixed = {p.name: p.default for p in known if p.kind is p.KEYWORD_ONLY and p.name not in _PER_CALL}
        unknown = [name for name in options if name not in fixed]
        if unknown:
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {unknown[0]!r}")
        self.options = fixed | options

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

    Args: the keyword arguments of :func:`tigon.linear_kl_div` but for those of a call.

    Shape: hidden ``[..., H]``, weight ``[V, H]``, teacher ``([..., H_t], [V_t, H_t])`` or ``[..., V_t]``,
    labels ``[...]`` or ``None`` -> scalar, or ``[...]`` with ``reduction="none"``.
    """

    function = staticmethod(linear_kl_div)


class LinearJSDLoss(_LinearDivergenceLoss):
    """:func:`tigon.linear_jsd` with its options fixed: as :class:`LinearKLDivLoss`."""

    function = staticmethod(linear_jsd)


class LinearTVDLoss(_LinearDivergenceLoss):
    """:func:`tigon.linear_tvd` with its options fixed: as :class:`LinearKLDivLoss`."""

    function = staticmethod(linear_tvd)
