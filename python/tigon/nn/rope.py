"""Rotary embedding as a module, alone or after the norms of q and k."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import TypedDict, Unpack

from tigon.error import check
from tigon.ops.arguments import check_integers, check_positive, checked_init, unpacked
from tigon.ops.qk_norm_rope import qk_norm_rope
from tigon.ops.rope import rope


class RotaryEmbedding(nn.Module):
    """:func:`tigon.rope` with the tables of Su et al. 2021: pair i rotates by ``position * base**(-2i/R)``.

    Args:
        head_dim: columns of a head.
        base: the slowest pair rotates ``base**(1 - 2/R)`` times slower than the first.
        rotary_dim: R, the number of columns that rotate; by default all.
        interleaved, tail, unsqueeze_dim: see :func:`tigon.rope`.

    Shape: q ``[B, Hq, T, D]``, k ``[B, Hk, T, D]`` or ``None``, as :func:`tigon.rope` takes and returns them.
    ``position_ids`` are ``[T]`` or ``[B, T]``; without them positions count from zero. The angles are float32
    in modules of any dtype; results have q's dtype.
    """

    @checked_init
    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        *,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        tail: bool = False,
        unsqueeze_dim: int = 1,
    ) -> None:
        super().__init__()
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        op = f"nn.{type(self).__name__}"
        check_integers(op, head_dim=head_dim, rotary_dim=rotary_dim)
        check_positive(op, "base", base)
        fits = 2 <= rotary_dim <= head_dim and rotary_dim % 2 == 0
        check(op, fits, "rotary_dim must be even and in [2, {}], got {}", head_dim, rotary_dim)
        self.head_dim, self.base, self.rotary_dim = head_dim, base, rotary_dim
        self.options = {"interleaved": interleaved, "tail": tail, "unsqueeze_dim": unsqueeze_dim}

    def tables(self, x: torch.Tensor, position_ids: torch.Tensor | None = None):
        """cos and sin ``[T, R/2]`` or ``[B, T, R/2]`` for the tokens of x, one column a pair."""
        if position_ids is None:
            tokens = x.shape[2 * x.dim() - 5 - self.options["unsqueeze_dim"] % x.dim()]
            position_ids = torch.arange(tokens, device=x.device)
        pairs = torch.arange(0, self.rotary_dim, 2, device=x.device, dtype=torch.float32)
        frequencies = 1.0 / self.base ** (pairs / self.rotary_dim)
        angles = position_ids.to(torch.float32).unsqueeze(-1) * frequencies
        return angles.cos(), angles.sin()

    def forward(self, q: torch.Tensor, k: torch.Tensor | None = None, position_ids=None):
        cos, sin = self.tables(q, position_ids)
        return rope(q, k, cos, sin, rotary_dim=self.rotary_dim, keep_dtype=True, **self.options)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.head_dim}, base={self.base}, rotary_dim={self.rotary_dim}, {options}"


class RotaryDict(TypedDict, total=False):
    """Options of :class:`RotaryEmbedding`."""

    rotary_dim: int | None
    interleaved: bool
    tail: bool
    unsqueeze_dim: int


class QKNormRotaryEmbedding(RotaryEmbedding):
    """:func:`tigon.qk_norm_rope`: RMSNorm of every head of q and k, then the rotation, in one pass.

    Args:
        head_dim, base, and the options: as in :class:`RotaryEmbedding`.
        eps, offset, rounding: options of the norms, as in :class:`tigon.nn.RMSNorm`.

    ``q_weight`` and ``k_weight`` ``[D]`` start at one minus ``offset``, so that they change nothing.
    """

    @unpacked(RotaryEmbedding.__init__)
    @checked_init
    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        rounding: str = "llama",
        device=None,
        dtype=None,
        **options: Unpack[RotaryDict],
    ) -> None:
        super().__init__(head_dim, base, **options)
        self.eps, self.offset, self.rounding = eps, offset, rounding
        for name in ("q_weight", "k_weight"):
            weight = torch.empty(head_dim, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(weight))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the weights to their initial values."""
        for weight in (self.q_weight, self.k_weight):
            nn.init.constant_(weight, 1.0 - self.offset)

    def forward(self, q: torch.Tensor, k: torch.Tensor | None = None, position_ids=None):
        cos, sin = self.tables(q, position_ids)
        return qk_norm_rope(
            q,
            k,
            self.q_weight,
            self.k_weight if k is not None else None,
            cos,
            sin,
            self.eps,
            offset=self.offset,
            rounding=self.rounding,
            rotary_dim=self.rotary_dim,
            keep_dtype=True,
            **self.options,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, eps={self.eps}, offset={self.offset}, rounding={self.rounding!r}"
