"""The router of experts as a module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tigon.ops.route import route


class Router(nn.Module):
    """A projection to E logits, and :func:`tigon.route`, under the parameter names of transformers.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: K.
        bias: whether the projection has one.
        correction: whether there is a buffer ``e_score_correction_bias`` ``[E]`` (zeros, float32), which what
            balances the experts without a loss writes to.
        wide: take the projection in float32, as DeepSeek's do.
        device, dtype: of the parameters.
        options: of :func:`tigon.route`: score, normalize, num_groups, top_groups, group_score, scale.

    Shape: ``hidden_states [..., H] -> weights [..., K], ids [..., K]``, with `losses` also ``aux`` and ``z``.
    """

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
        **options,
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
        route(probe, top_k, **options)  # options that do not fit are refused now

    def reset_parameters(self) -> None:
        """Weight uniform as that of :class:`torch.nn.Linear`, bias and correction zero."""
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
            F.linear(*tensors), self.top_k, correction_bias=self.e_score_correction_bias, losses=losses,
            token_weights=token_weights, **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{hidden}, {experts}, {self.top_k}{options}"
