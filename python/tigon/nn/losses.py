"""Losses with fixed options, as modules; the weight of a head is an argument of the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import TypedDict, Unpack

from tigon.ops.arguments import check_float, unpacked
from tigon.ops.cross_entropy import cross_entropy
from tigon.ops.loss_head.linear_cross_entropy import linear_cross_entropy
from tigon.ops.loss_head.linear_divergence import linear_jsd, linear_kl_div, linear_tvd
from tigon.ops.loss_head.linear_preference import (
    LinearPolicyResult,
    linear_kto,
    linear_policy,
    linear_preference,
)
from tigon.ops.loss_head.options import (
    LinearCrossEntropyDict,
    LinearJSDDict,
    LinearKLDivDict,
    LinearKTODict,
    LinearPolicyDict,
    LinearPreferenceDict,
    LinearTVDDict,
)
from tigon.ops.preference import KTOResult, PreferenceResult


class CrossEntropyDict(TypedDict, total=False):
    """Options of :func:`tigon.cross_entropy`."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    inplace: bool


class _Loss(nn.Module):
    """A loss whose keyword arguments are fixed, except those that ``forward`` names."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.options = {name: value for name, value in options.items() if name != "class_weight"}

    def _keep(self, name: str, weight: torch.Tensor | None) -> None:
        """Register the weight of each class as a buffer."""
        if weight is not None:
            check_float(f"nn.{type(self).__name__}", name, weight)
        self.register_buffer(name, weight)

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items())


class CrossEntropyLoss(_Loss):
    """:func:`tigon.cross_entropy` with fixed options, named as in PyTorch and Tigon.

    Args:
        weight: ``[V]`` weight of each class or ``None``; a buffer.
        ignore_index, reduction, label_smoothing: as in :class:`torch.nn.CrossEntropyLoss`.
        softcap, z_loss, inplace: as in :func:`tigon.cross_entropy`.

    Shape: logits ``[..., V]``, target ``[...]`` -> scalar, or ``[...]`` with ``reduction="none"``.
    """

    @unpacked(cross_entropy)
    def __init__(self, weight: torch.Tensor | None = None, **options: Unpack[CrossEntropyDict]) -> None:
        super().__init__(options)
        self._keep("weight", weight)

    def forward(
        self, logits: torch.Tensor, target: torch.Tensor, denominator: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the loss; ``denominator`` replaces that of the reduction."""
        return cross_entropy(logits, target, weight=self.weight, denominator=denominator, **self.options)


class LinearCrossEntropyLoss(_Loss):
    """:func:`tigon.linear_cross_entropy` with fixed options; the head's weight is an argument of the call.

    The constructor takes keyword arguments of :func:`tigon.linear_cross_entropy`.

    Shape: hidden ``[..., H]``, weight ``[V, H]``, target ``[...]`` -> scalar, or ``[...]`` with
    ``reduction="none"``.
    """

    @unpacked(linear_cross_entropy)
    def __init__(self, **options: Unpack[LinearCrossEntropyDict]) -> None:
        super().__init__(options)
        self._keep("class_weight", options.get("class_weight"))

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
        lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            denominator=denominator,
            token_weight=token_weight,
            valid_rows=valid_rows,
            position_ids=position_ids,
            lora=lora,
            class_weight=self.class_weight,
            **self.options,
        )


class LinearKLDivLoss(_Loss):
    """:func:`tigon.linear_kl_div` with fixed options; the heads' weights are arguments of the call.

    The constructor takes the keyword arguments of :func:`tigon.linear_kl_div`, except those of ``forward``.

    Shape: hidden ``[..., H]``, weight ``[V, H]``, teacher ``([..., H_t], [V_t, H_t])`` or ``[..., V_t]``,
    labels ``[...]`` or ``None`` -> scalar, or ``[...]`` with ``reduction="none"``.
    """

    function: Callable = staticmethod(linear_kl_div)

    @unpacked(linear_kl_div)
    def __init__(self, **options: Unpack[LinearKLDivDict]) -> None:
        super().__init__(options)

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
        lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        return self.function(
            hidden,
            weight,
            teacher,
            labels,
            bias=bias,
            denominator=denominator,
            token_weight=token_weight,
            valid_rows=valid_rows,
            position_ids=position_ids,
            lora=lora,
            **self.options,
        )


class LinearJSDLoss(LinearKLDivLoss):
    """:func:`tigon.linear_jsd` with fixed options, called like :class:`LinearKLDivLoss`."""

    function = staticmethod(linear_jsd)

    @unpacked(linear_jsd)
    def __init__(self, **options: Unpack[LinearJSDDict]) -> None:
        _Loss.__init__(self, options)


class LinearTVDLoss(LinearKLDivLoss):
    """:func:`tigon.linear_tvd` with fixed options, called like :class:`LinearKLDivLoss`."""

    function = staticmethod(linear_tvd)

    @unpacked(linear_tvd)
    def __init__(self, **options: Unpack[LinearTVDDict]) -> None:
        _Loss.__init__(self, options)


class LinearPreferenceLoss(_Loss):
    """:func:`tigon.linear_preference` with fixed options.

    The constructor takes the keyword arguments of :func:`tigon.linear_preference`, except those of
    ``forward``.

    Shape: hidden ``[2P, T, H]``, weight ``[V, H]``, target ``[2P, T]`` -> :class:`PreferenceResult`.
    """

    @unpacked(linear_preference)
    def __init__(self, **options: Unpack[LinearPreferenceDict]) -> None:
        super().__init__(options)

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        ref: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        **per_call: Unpack[LinearPreferenceDict],
    ) -> PreferenceResult:
        return linear_preference(hidden, weight, target, ref=ref, **self.options | per_call)


class LinearKTOLoss(_Loss):
    """:func:`tigon.linear_kto` with fixed options.

    The constructor takes the keyword arguments of :func:`tigon.linear_kto`, except those of ``forward``.

    Shape: hidden ``[B, T, H]``, weight ``[V, H]``, target ``[B, T]``, desirable ``[B]`` ->
    :class:`KTOResult`.
    """

    @unpacked(linear_kto)
    def __init__(self, **options: Unpack[LinearKTODict]) -> None:
        super().__init__(options)

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        desirable: torch.Tensor,
        kl: float | torch.Tensor = 0.0,
        ref: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        **per_call: Unpack[LinearKTODict],
    ) -> KTOResult:
        return linear_kto(hidden, weight, target, desirable, kl=kl, ref=ref, **self.options | per_call)


class LinearPolicyLoss(_Loss):
    """:func:`tigon.linear_policy` with fixed options.

    The constructor takes the keyword arguments of :func:`tigon.linear_policy`, except those of ``forward``.

    Shape: hidden ``[B, T, H]``, weight ``[V, H]``, target ``[B, T]``, advantage ``[B]`` or ``[B, T]`` ->
    :class:`LinearPolicyResult`.
    """

    @unpacked(linear_policy)
    def __init__(self, **options: Unpack[LinearPolicyDict]) -> None:
        super().__init__(options)

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        advantage: torch.Tensor,
        old: torch.Tensor | None = None,
        ref: torch.Tensor | None = None,
        importance: torch.Tensor | None = None,
        **per_call: Unpack[LinearPolicyDict],
    ) -> LinearPolicyResult:
        tensors = {"old": old, "ref": ref, "importance": importance}
        return linear_policy(hidden, weight, target, advantage, **tensors, **self.options | per_call)
