"""Losses with their options fixed, as modules; a head's weight stays with its model."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn

from tigon.ops.cross_entropy import cross_entropy
from tigon.ops.loss_head.linear_cross_entropy import linear_cross_entropy
from tigon.ops.loss_head.linear_divergence import linear_jsd, linear_kl_div, linear_tvd
from tigon.ops.loss_head.linear_preference import (
    LinearPolicyResult,
    linear_kto,
    linear_policy,
    linear_preference,
)
from tigon.ops.preference import KTOResult, PreferenceResult


class _Loss(nn.Module):
    """What prints the options of a loss."""

    options: dict

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class CrossEntropyLoss(_Loss):
    """:func:`tigon.cross_entropy` with its options fixed; torch's names, and ours.

    Args:
        weight: ``[V]`` weight of each class or ``None``; a buffer.
        ignore_index, reduction, label_smoothing: as :class:`torch.nn.CrossEntropyLoss`.
        softcap, z_loss, inplace: as :func:`tigon.cross_entropy`.

    Shape: logits ``[..., V]``, target ``[...]`` -> scalar, or ``[...]`` with ``reduction="none"``.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.options = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "z_loss": z_loss,
            "inplace": inplace,
        }

    def forward(
        self, logits: torch.Tensor, target: torch.Tensor, denominator: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss; ``denominator`` replaces the reduction's own."""
        return cross_entropy(logits, target, weight=self.weight, denominator=denominator, **self.options)


class LinearCrossEntropyLoss(_Loss):
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


_PER_CALL = ("bias", "lora", "token_weight", "denominator", "valid_rows", "position_ids")


class _LinearDivergenceLoss(_Loss):
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


class _Fixed(_Loss):
    """A function with its options fixed; the head's weight stays with the model."""

    function: Callable

    def __init__(self, **options) -> None:
        super().__init__()
        inspect.signature(type(self).function).bind_partial(**options)  # a TypeError here, not in a step
        self.options = options


class LinearPreferenceLoss(_Fixed):
    """:func:`tigon.linear_preference` with its options fixed.

    Args: the keyword arguments of :func:`tigon.linear_preference` but for those of a call.

    Shape: hidden ``[2P, T, H]``, weight ``[V, H]``, target ``[2P, T]`` -> :class:`PreferenceResult`.
    """

    function = staticmethod(linear_preference)

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        ref: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        **per_call,
    ) -> PreferenceResult:
        return linear_preference(hidden, weight, target, ref=ref, **{**self.options, **per_call})


class LinearKTOLoss(_Fixed):
    """:func:`tigon.linear_kto` with its options fixed.

    Args: the keyword arguments of :func:`tigon.linear_kto` but for those of a call.

    Shape: hidden ``[B, T, H]``, weight ``[V, H]``, target ``[B, T]``, desirable ``[B]`` ->
    :class:`KTOResult`.
    """

    function = staticmethod(linear_kto)

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        desirable: torch.Tensor,
        kl: float | torch.Tensor = 0.0,
        ref: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        **per_call,
    ) -> KTOResult:
        return linear_kto(hidden, weight, target, desirable, kl=kl, ref=ref, **{**self.options, **per_call})


class LinearPolicyLoss(_Fixed):
    """:func:`tigon.linear_policy` with its options fixed.

    Args: the keyword arguments of :func:`tigon.linear_policy` but for those of a call.

    Shape: hidden ``[B, T, H]``, weight ``[V, H]``, target ``[B, T]``, advantage ``[B]`` or ``[B, T]`` ->
    :class:`LinearPolicyResult`.
    """

    function = staticmethod(linear_policy)

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        advantage: torch.Tensor,
        old: torch.Tensor | None = None,
        ref: torch.Tensor | None = None,
        importance: torch.Tensor | None = None,
        **per_call,
    ) -> LinearPolicyResult:
        tensors = {"old": old, "ref": ref, "importance": importance}
        return linear_policy(hidden, weight, target, advantage, **tensors, **{**self.options, **per_call})
