"""Norms and DyT as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tigon.ops.add_rms_norm import add_rms_norm
from tigon.ops.arguments import checked_init
from tigon.ops.columns import check_eps, normalized_size
from tigon.ops.dyt import dyt
from tigon.ops.gated_rms_norm import gated_rms_norm
from tigon.ops.group_norm import check_groups, group_norm
from tigon.ops.layer_norm import layer_norm
from tigon.ops.modulated_rms_norm import modulated_rms_norm
from tigon.ops.poly_norm import poly_norm
from tigon.ops.rms_norm import rms_norm


class _Norm(nn.Module):
    """A norm; parameters that it does not have are registered as None."""

    offset = 0.0

    def _add(self, name: str, size: int, there: bool, device, dtype) -> None:
        value = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if there else None
        self.register_parameter(name, value)

    def reset_parameters(self) -> None:
        """Reset the weight to one minus the offset, and the bias to zero."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)
        if getattr(self, "bias", None) is not None:
            nn.init.zeros_(self.bias)


class RMSNorm(_Norm):
    """:func:`tigon.rms_norm` with a learned weight.

    Args:
        hidden_size: size C of the last dimension; a sequence of one number also works, as in PyTorch.
        eps: added to the mean square.
        offset: added to the weight (Gemma: 1). The weight starts at 1 minus the offset.
        rounding: ``"llama"``, ``"gemma"`` or ``"none"``, see :func:`tigon.rms_norm`.
        elementwise_affine: ``False`` for no weight.

    Shape: ``[..., C] -> [..., C]``.
    """

    @checked_init
    def __init__(
        self,
        hidden_size: int | Sequence[int],
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        rounding: str = "llama",
        elementwise_affine: bool = True,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        hidden_size = normalized_size("nn.RMSNorm", hidden_size)
        check_eps("nn.RMSNorm", eps)
        self.hidden_size, self.eps, self.offset, self.rounding = hidden_size, eps, offset, rounding
        self._add("weight", hidden_size, elementwise_affine, device, dtype)
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, rounding=self.rounding)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, rounding={self.rounding!r}, "
            f"elementwise_affine={self.weight is not None}"
        )


class AddRMSNorm(RMSNorm):
    """:func:`tigon.add_rms_norm` with a learned weight; arguments as :class:`RMSNorm`.

    Shape: ``[..., C], [..., C] -> [..., C], [..., C]``.
    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset, rounding=self.rounding)


class ModulatedRMSNorm(RMSNorm):
    """:func:`tigon.modulated_rms_norm` with a learned weight; each call takes scale and shift.

    The constructor takes the arguments of :class:`tigon.nn.RMSNorm`.

    Shape: x ``[..., C]``, scale and shift ``[C]``, ``[B, C]``, ``[B, 1, C]`` or x's ``-> [..., C]``.
    """

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        options = {"offset": self.offset, "rounding": self.rounding}
        return modulated_rms_norm(x, self.weight, scale, shift, self.eps, **options)


class GatedRMSNorm(_Norm):
    """:func:`tigon.gated_rms_norm` with a learned weight, which starts at one.

    Args:
        hidden_size: size C of the last dimension.
        eps: added to the mean square.
        norm_before_gate, group_size, activation, rounding: see :func:`tigon.gated_rms_norm`.

    Shape: ``[..., C], [..., C] -> [..., C]``.
    """

    @checked_init
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        device=None,
        dtype=None,
        norm_before_gate: bool = True,
        group_size: int | None = None,
        activation: str = "silu",
        rounding: str = "llama",
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.options = {
            "norm_before_gate": norm_before_gate,
            "group_size": group_size,
            "activation": activation,
            "rounding": rounding,
        }
        self._add("weight", hidden_size, True, device, dtype)
        self.reset_parameters()

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps, **self.options)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.hidden_size}, eps={self.eps}, {options}"


class LayerNorm(_Norm):
    """:func:`tigon.layer_norm` with learned weight and bias, as :class:`torch.nn.LayerNorm` of one dimension.

    Args:
        hidden_size: size C of the last dimension; a sequence of one number also works, as in PyTorch.
        eps: added to the variance.
        elementwise_affine: ``False`` for neither weight nor bias.
        bias: ``False``: only a weight.

    Shape: ``[..., C] -> [..., C]``.
    """

    @checked_init
    def __init__(
        self,
        hidden_size: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        hidden_size = normalized_size("nn.LayerNorm", hidden_size)
        check_eps("nn.LayerNorm", eps)
        self.hidden_size, self.eps = hidden_size, eps
        self._add("weight", hidden_size, elementwise_affine, device, dtype)
        self._add("bias", hidden_size, elementwise_affine and bias, device, dtype)
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, elementwise_affine={self.weight is not None}, "
            f"bias={self.bias is not None}"
        )


class GroupNorm(_Norm):
    """:func:`tigon.group_norm` with learned weight and bias, as :class:`torch.nn.GroupNorm`.

    Args:
        num_groups: a divisor of ``num_channels``.
        num_channels: size C of the second dimension.
        eps: added to the variance.
        affine: ``False`` for neither weight nor bias.

    Shape: ``[N, C, ...] -> [N, C, ...]``.
    """

    @checked_init
    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_groups("nn.GroupNorm", "num_groups", num_groups, num_channels)
        check_eps("nn.GroupNorm", eps)
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self._add("weight", num_channels, affine, device, dtype)
        self._add("bias", num_channels, affine, device, dtype)
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.weight is not None}"


class PolyNorm(nn.Module):
    """:func:`tigon.poly_norm` with a learned weight ``[3]``, initially 1/3, and bias ``[1]``, initially 1.

    Args:
        eps: added to the mean squares.

    Shape: ``[..., C] -> [..., C]``.
    """

    @checked_init
    def __init__(self, eps: float = 1e-6, *, device=None, dtype=None):
        super().__init__()
        check_eps("nn.PolyNorm", eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset weight and bias to their initial values."""
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.ones_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poly_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class DyT(_Norm):
    """:func:`tigon.dyt` with learned alpha, weight and bias.

    Args:
        hidden_size: size C of the last dimension.
        init_alpha: initial value of alpha.
        bias: ``False`` for no bias.

    Shape: ``[..., C] -> [..., C]``.
    """

    @checked_init
    def __init__(
        self, hidden_size: int, init_alpha: float = 0.5, *, bias: bool = True, device=None, dtype=None
    ):
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self._add("alpha", 1, True, device, dtype)
        self._add("weight", hidden_size, True, device, dtype)
        self._add("bias", hidden_size, bias, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset alpha to its initial value, weight to 1 and bias to 0."""
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.init_alpha)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dyt(x, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, bias={self.bias is not None}"
