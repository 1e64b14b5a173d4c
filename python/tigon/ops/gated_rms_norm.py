"""RMSNorm with a gate. Contract: ``csrc/tigon/ops/gated_rms_norm/gated_rms_norm.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon._dtensor import Layout
from tigon._op import has_kernel, paired
from tigon.error import check
from tigon.ops import rms_norm as norm
from tigon.ops.arguments import check_booleans, check_choice, check_float, check_integers
from tigon.ops.columns import check_sizes, columns_for

_ACTIVATIONS = {"silu": 0, "sigmoid": 1}


def reference(
    x,
    gate,
    weight=None,
    eps=1e-6,
    *,
    norm_before_gate=True,
    group_size=None,
    activation="silu",
    offset=0.0,
    rounding="llama",
):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    double = x.dtype == torch.float64
    wide = x if double else x.float()
    act = getattr(F, activation)(gate if double else gate.float())
    if not norm_before_gate:
        wide = wide * act
    size = group_size or x.shape[-1]
    groups = torch.unflatten(wide, -1, (x.shape[-1] // size, size))
    h = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    if rounding == "llama":
        h = h.to(x.dtype)
    if weight is not None:
        h = h * (offset + (weight if rounding == "llama" else weight.to(h.dtype)))
    if norm_before_gate:
        return (h * act).to(x.dtype)
    return h if rounding == "llama" else h.to(x.dtype)


def _result_dtype(x, weight, norm_first, rounding):
    return x.dtype if norm_first else norm.result_dtype(x, weight, rounding)


def _fake(x, gate, weight, eps, group, norm_first, act, offset, rounding):
    y = x.new_empty(x.shape, dtype=_result_dtype(x, weight, norm_first, rounding))
    return y, x.new_empty(x.numel() // (group or x.shape[-1]), dtype=torch.float32)


_op = paired("gated_rms_norm", _fake, results=1, layout=Layout(rows=2, columns=1))


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    activation: str = "silu",
    offset: float = 0.0,
    rounding: str = "llama",
) -> torch.Tensor:
    """RMSNorm over the last dimension, gated, in one pass.

    ``rms_norm(x, weight) * act(gate)``; with ``norm_before_gate=False``: ``rms_norm(x * act(gate), weight)``

    Args:
        x, weight, eps, offset: as in :func:`tigon.rms_norm`.
        gate: x's shape, dtype and device; often a slice of a wider projection, which is not copied.
        norm_before_gate: the order: ``True`` as Qwen3-Next, ``False`` as Mamba2, Zamba2, Bamba, Nemotron-H.
        group_size: columns normalised together, a divisor of C; ``None``: all.
        activation: ``"silu"`` or ``"sigmoid"`` (Kimi Linear).
        rounding: ``"llama"`` rounds the normalised value to x's dtype before the weight, and its product with
            the weight before the gate; ``"gemma"`` rounds once, at the end.

    Returns:
        ``[..., C]``, contiguous, in x's dtype; gate first with rounding ``"llama"``: in
        ``promote(x, weight)``. Differentiable in x, gate and weight; accumulation in float32; bitwise
        deterministic.

    Raises:
        tigon.Error: shape, dtype, device or an option does not fit.

    Source: Dao & Gu 2024, "Transformers are SSMs", section 7.1; Hugging Face Qwen3-Next.
    """
    op = "gated_rms_norm"
    norm.check_options(op, x, weight, eps, offset, rounding)
    check(op, rounding != "none", "rounding must be 'llama' or 'gemma', got {!r}", rounding)
    check_float(op, "gate", gate)
    check_choice(op, "activation", activation, _ACTIVATIONS)
    check_booleans(op, norm_before_gate=norm_before_gate)
    check(op, gate.shape == x.shape, "gate must be {}, got {}", x.shape, gate.shape)
    check(op, gate.dtype == x.dtype, "gate must be {}, got {}", x.dtype, gate.dtype)
    if group_size is not None:
        check_integers(op, group_size=group_size)
        check(op, group_size > 0, "group_size must be > 0, got {}", group_size)  # the core takes 0 for all
    if not has_kernel(op, x=x, gate=gate, weight=weight):
        check_sizes(op, x, eps, weight=weight)
        divides = x.shape[-1] % (group_size or 1) == 0
        check(op, divides, "group_size must divide {}, got {}", x.shape[-1], group_size)
        return reference(
            x,
            gate,
            weight,
            eps,
            norm_before_gate=norm_before_gate,
            group_size=group_size,
            activation=activation,
            offset=offset,
            rounding=rounding,
        )
    (weight,) = columns_for(op, ("weight",), x, weight)
    options = (group_size or 0, norm_before_gate, _ACTIVATIONS[activation], offset, norm.ROUNDINGS[rounding])
    return _op(x, gate, weight, eps, *options)
