"""Losses of preferences and policies under a linear head, as modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn

from tigon.ops.loss_head.linear_preference import (
    LinearPolicyResult,
    linear_kto,
    linear_policy,
    linear_preference,
)
from tigon.ops.preference import KTOResult, PreferenceResult


class _Fixed(nn.Module):
    """A function with its options fixed; the head's weight stays with the model."""

    function: Callable

    def __init__(self, **options) -> None:
        super().__init__()
        inspect.signature(type(self).function).bind_partial(**options)  # a TypeError here, not in a step
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items())


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
