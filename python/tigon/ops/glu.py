"""Gated linear units (Shazeer 2020, section 2). Contract: ``csrc/tigon/ops/glu/glu.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon import _fp8_bytes
from tigon._dtensor import Layout
from tigon._load import native
from tigon._op import Op, caller, has_kernel, may_overwrite_saved, only_graph_holds, raw
from tigon.error import check, refuse
from tigon.ops.arguments import check_choice, check_float, check_numbers, check_positive, of_one_shape

_KINDS = {"swiglu": 0, "geglu": 1, "geglu_tanh": 2, "reglu": 3, "swiglu_oai": 4, "swiglu_clamped": 6}
_ALPHA, _LIMIT = 1.702, 7.0


def reference(
    gate, up=None, kind="swiglu", gate_multiplier=1.0, down_multiplier=1.0, alpha=_ALPHA, limit=_LIMIT
):
    """The same formulas in plain PyTorch operations (any float dtype, any device)."""
    dtype = gate.dtype
    if kind == "swiglu_oai":
        gate, up = gate[..., ::2], gate[..., 1::2]
    elif up is None:
        gate, up = gate.chunk(2, dim=-1)
    if dtype != torch.float64:
        gate, up = gate.float(), up.float()
    if kind == "swiglu_oai":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return ((up + 1) * (gate * torch.sigmoid(alpha * gate))).to(dtype)
    if kind == "swiglu_clamped":
        return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(dtype)
    if kind == "swiglu":
        return (F.silu(gate_multiplier * gate) * up * down_multiplier).to(dtype)
    if kind == "reglu":
        return (F.relu(gate) * up).to(dtype)
    approximate = "tanh" if kind == "geglu_tanh" else "none"
    return (F.gelu(gate, approximate=approximate) * up).to(dtype)


def _fake(gate, up, *_):
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


def _fake_bwd(dy, gate, up, kind, gate_multiplier, down_multiplier, alpha, limit, need_dgate, need_dup):
    dgate = gate.new_empty(gate.shape if need_dgate else (0,))
    return dgate, gate.new_empty(gate.shape if need_dup and up is not None else (0,))


_bwd = raw("glu_bwd", _fake_bwd)
_bwd_in_place = raw("glu_bwd_in_place", lambda *_: None, "glu")
_bwd_fp8, _bwd_fp8_in_place = (
    caller("glu_bwd", native(name)) for name in ("glu_bwd_fp8", "glu_bwd_fp8_in_place")
)


def _setup_context(ctx, inputs, output):
    gate, up, *ctx.options = inputs
    ctx.save_for_backward(gate, up)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy):
    dgate = dup = None
    if dy is not None:
        saved = tuple(t for t in ctx.saved_tensors if t is not None)
        # The gradients overwrite gate and up if nobody can see it.
        in_place = all(ctx.needs_input_grad[: len(saved)]) and may_overwrite_saved(saved)
        in_place = in_place and only_graph_holds(saved) and all(t.is_contiguous() for t in saved)
        gate, up = saved if len(saved) == 2 else (*saved, None)
        factors = _fp8_bytes.factors_of(ctx) if up is not None and all(ctx.needs_input_grad[:2]) else ()
        if factors:
            if in_place:
                made = _bwd_fp8_in_place(dy, gate, up, *ctx.options, *factors)
                dgate, dup = gate.detach(), up.detach()
            else:
                dgate, dup, *made = _bwd_fp8(dy, gate, up, *ctx.options, True, True, *factors)
            _fp8_bytes.put(dgate, *made[:2], factors[0])
            _fp8_bytes.put(dup, *made[2:], factors[1])
            return dgate, dup, None, None, None, None, None
        if in_place:
            _bwd_in_place(dy, gate, up, *ctx.options)
            return gate.detach(), None if up is None else up.detach(), None, None, None, None, None
        need_dgate, need_dup = ctx.needs_input_grad[0], up is not None and ctx.needs_input_grad[1]
        dgate, dup = _bwd(dy, gate, up, *ctx.options, need_dgate, need_dup)
        dgate, dup = dgate if need_dgate else None, dup if need_dup else None
    return dgate, dup, None, None, None, None, None


_layout = Layout(rows=2, elementwise=True)
_op = Op(
    "glu",
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    layout=_layout,
    fp8=lambda inputs: _fp8_bytes.weight_behind(inputs[0]),
)


def _glu(op, kind, gate, up, gate_multiplier=1.0, down_multiplier=1.0, alpha=_ALPHA, limit=_LIMIT):
    """Check, choose between kernel and reference, run. `op` is the public name."""
    options = _KINDS[kind], gate_multiplier, down_multiplier, alpha, limit
    if of_one_shape(gate, up):
        y = _op.quick(gate, up, *options)
        if y is not None:
            return y
    name = "gate_up" if kind == "swiglu_oai" else "gate"
    check_float(op, name, gate)
    if up is None:
        if gate.dim() == 0:
            refuse(op, name + " must have at least one dimension, got 0")
        if gate.size(-1) % 2 != 0:
            refuse(op, name + " must have an even number of columns, got {}", gate.shape[-1])
    else:
        check_float(op, "up", up)
        if up.dtype != gate.dtype:
            refuse(op, "up must be {}, got {}", gate.dtype, up.dtype)
        if up.shape != gate.shape:
            refuse(op, "up must be {}, got {}", gate.shape, up.shape)
        if up.device != gate.device:
            refuse(op, "up must be on {}, got {}", gate.device, up.device)
    if not has_kernel(op, gate=gate, up=up):
        return reference(gate, up, kind, gate_multiplier, down_multiplier, alpha, limit)
    if gate.dim() == 0:
        return _op(gate.reshape(1), up.reshape(1), *options).reshape(())
    return _op(gate, up, *options)


def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
) -> torch.Tensor:
    """Gated activation ``silu(gate) * up`` with ``silu(x) = x / (1 + e^-x)``.

    Args:
        gate: ``[..., F]`` float32, bfloat16 or float16. Rows may lie apart in memory (gate and up as the
            halves of one ``[..., 2F]`` tensor are read where they are); any other layout is copied once.
            float64 runs the eager reference.
        up: shape, dtype and device of gate; ``None`` when ``gate`` is ``[..., 2F]`` and holds both, gate
            first. The gradient is then one tensor too.
        gate_multiplier, down_multiplier: factors of gate and of the result (Falcon-H1).
        limit: gate is clamped to at most limit and up to ``[-limit, limit]``, with no gradient beyond
            (DeepSeek-V4). Not together with the multipliers.

    Returns:
        ``[..., F]`` in the inputs' dtype, contiguous. Differentiable in both; arithmetic in float32, rounded
        once (plain ``F.silu(gate) * up`` rounds twice in 16 bits); bitwise deterministic. gate and up are
        kept for the backward by reference; a backward that frees its graph writes the gradients into their
        memory if nothing else holds it, so that no one can see the difference.

    Raises:
        tigon.Error: shape, dtype or device does not fit.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", section 2.
    """
    one = (
        type(gate_multiplier) is type(down_multiplier) is float and gate_multiplier == down_multiplier == 1.0
    )
    if not one:  # the common case, for the host's time
        check_numbers("swiglu", gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    if limit is None:
        return _glu("swiglu", "swiglu", gate, up, gate_multiplier, down_multiplier)
    check_positive("swiglu", "limit", limit)
    alone = gate_multiplier == down_multiplier == 1
    check("swiglu", alone, "limit must be None with multipliers, got {}", limit)
    return _glu("swiglu", "swiglu_clamped", gate, up, limit=limit)


def geglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, approximate: str = "tanh") -> torch.Tensor:
    """Gated activation ``gelu(gate) * up``.

    Args:
        gate, up: as :func:`swiglu`.
        approximate: ``"tanh"`` for ``gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`` (Gemma),
            ``"none"`` for ``x Phi(x)`` with the normal distribution ``Phi``.

    Returns and raises: as :func:`swiglu`. Small values of ``Phi`` keep their digits, where
    ``1 + erf(x / sqrt 2)`` cancels.

    Source: Shazeer 2020, section 2; Hendrycks & Gimpel 2016, "Gaussian Error Linear Units".
    """
    check_choice("geglu", "approximate", approximate, ("tanh", "none"))
    return _glu("geglu", "geglu_tanh" if approximate == "tanh" else "geglu", gate, up)


def reglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Gated activation ``relu(gate) * up``. Arguments, result and errors as :func:`swiglu`.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", section 2.
    """
    return _glu("reglu", "reglu", gate, up)


def swiglu_oai(gate_up: torch.Tensor, *, alpha: float = _ALPHA, limit: float = _LIMIT) -> torch.Tensor:
    """Clamped SwiGLU of gpt-oss, ``(up + 1) * gate * sigmoid(alpha * gate)``.

    Args:
        gate_up: ``[..., 2F]``, columns of gate and up alternate (``gate_up[..., ::2]`` is gate); layouts and
            dtypes as :func:`swiglu`.
        alpha: slope of the sigmoid.
        limit: gate is clamped to at most limit, up to ``[-limit, limit]``; no gradient beyond.

    Returns and raises: as :func:`swiglu`; the gradient has the layout of ``gate_up``.

    Source: gpt-oss, ``swiglu`` of its reference implementation.
    """
    check_numbers("swiglu_oai", alpha=alpha, limit=limit)
    check("swiglu_oai", limit > 0, "limit must be > 0, got {}", limit)
    return _glu("swiglu_oai", "swiglu_oai", gate_up, None, alpha=alpha, limit=limit)
