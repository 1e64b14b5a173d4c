"""Experts and their router as modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import TypedDict, Unpack

from tigon.ops.arguments import check_choice, checked_init, unpacked
from tigon.ops.experts import ALPHA, KINDS, LIMIT, experts
from tigon.ops.route import route


class Experts(nn.Module):
    """:func:`tigon.experts` with learned matrices, under the parameter names of transformers.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        activation, gated, interleaved, transposed, alpha, limit: as in :func:`tigon.experts`.
        bias: whether to add ``gate_up_proj_bias`` ``[E, 2 I]`` and ``down_proj_bias`` ``[E, H]``.

    Shape: ``hidden_states [..., H], top_k_index [..., K], top_k_weights [..., K] -> [..., H]``.
    """

    @checked_init
    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        *,
        bias: bool = False,
        device=None,
        dtype=None,
        gated: bool = True,
        interleaved: bool = False,
        transposed: bool = False,
        alpha: float = ALPHA,
        limit: float = LIMIT,
    ) -> None:
        super().__init__()
        check_choice("nn.Experts", "activation", activation, KINDS)
        self.num_experts = num_experts
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.activation, self.gated, self.interleaved = activation, gated, interleaved
        self.transposed, self.alpha, self.limit = transposed, alpha, limit
        wide = 2 * intermediate_size if self.gated else intermediate_size
        first, second = (wide, hidden_size), (hidden_size, intermediate_size)
        if self.transposed:
            first, second = first[::-1], second[::-1]
        where = {"device": device, "dtype": dtype}
        self._first = "gate_up_proj" if self.gated else "up_proj"
        self.register_parameter(self._first, nn.Parameter(torch.empty(num_experts, *first, **where)))
        self.down_proj = nn.Parameter(torch.empty(num_experts, *second, **where))
        for name, size in ((self._first, wide), ("down_proj", hidden_size)):
            biases = nn.Parameter(torch.empty(num_experts, size, **where)) if bias else None
            self.register_parameter(f"{name}_bias", biases)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw uniform matrices as :class:`torch.nn.Linear` does; set biases to zero."""
        sizes = {self._first: self.hidden_size, "down_proj": self.intermediate_size}
        for name, inner in sizes.items():
            nn.init.uniform_(getattr(self, name), -(inner**-0.5), inner**-0.5)
            if getattr(self, f"{name}_bias") is not None:
                nn.init.zeros_(getattr(self, f"{name}_bias"))

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return experts(
            hidden_states,
            getattr(self, self._first),
            self.down_proj,
            top_k_index,
            top_k_weights,
            activation=self.activation,
            gated=self.gated,
            interleaved=self.interleaved,
            transposed=self.transposed,
            gate_up_bias=getattr(self, f"{self._first}_bias"),
            down_bias=self.down_proj_bias,
            alpha=self.alpha,
            limit=self.limit,
        )

    def extra_repr(self) -> str:
        sizes = f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}, {self.activation!r}"
        return sizes + ("" if self.gated else ", gated=False")


class RouteDict(TypedDict, total=False):
    """Options of :func:`tigon.route` that a router fixes."""

    score: str
    normalize: bool
    num_groups: int
    top_groups: int
    group_score: str
    scale: float
    ids_dtype: torch.dtype


class Router(nn.Module):
    """A projection to E logits, and :func:`tigon.route`, under the parameter names of transformers.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: K.
        bias: whether the projection has a bias.
        correction: whether to add a buffer ``e_score_correction_bias`` ``[E]`` (zeros, float32), for code
            that balances the experts without a loss.
        wide: compute the projection in float32, as DeepSeek models do.
        device, dtype: of the parameters.
        options: of :func:`tigon.route`: score, normalize, num_groups, top_groups, group_score, scale,
            ids_dtype.

    Shape: ``hidden_states [..., H] -> weights [..., K], ids [..., K]``, with `losses` also ``aux`` and ``z``.
    """

    @unpacked(route)
    @checked_init
    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        bias: bool = False,
        correction: bool = False,
        wide: bool = False,
        device=None,
        dtype=None,
        **options: Unpack[RouteDict],
    ) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.top_k, self.wide, self.options = top_k, wide, options
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, **where))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_experts, **where)) if bias else None)
        offsets = torch.zeros(num_experts, device=device, dtype=torch.float32) if correction else None
        self.register_buffer("e_score_correction_bias", offsets)
        self.reset_parameters()
        probe = torch.empty(1, num_experts, device="meta")
        route(probe, top_k, **options)  # raises an error now if options do not fit

    def reset_parameters(self) -> None:
        """Draw a uniform weight as :class:`torch.nn.Linear` does; set bias and correction to zero."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias.zero_()

    def forward(
        self, hidden_states: torch.Tensor, *, losses: bool = False, token_weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        tensors = (hidden_states, self.weight, self.bias)
        if self.wide:
            tensors = (t if t is None else t.float() for t in tensors)
        return route(
            F.linear(*tensors),
            self.top_k,
            correction_bias=self.e_score_correction_bias,
            losses=losses,
            token_weights=token_weights,
            **self.options,
        )

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{hidden}, {experts}, {self.top_k}{options}"
