"""SwiGLU (Shazeer 2020, section 2). Contract: ``tigon/ops/swiglu/swiglu.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon._op import Op, has_kernel, raw
from tigon.error import Error


def reference(gate, up):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    if gate.dtype == torch.float64:
        return F.silu(gate) * up
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def _fake(gate, up):
    return gate.new_empty(gate.shape)


def _fake_bwd(dy, gate, up, need_dgate, need_dup):
    dgate = gate.new_empty(gate.shape if need_dgate else (0,))
    return dgate, gate.new_empty(gate.shape if need_dup else (0,))


_bwd = raw("swiglu_bwd", _fake_bwd)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy):
    if dy is None:
        return None, None
    gate, up = ctx.saved_tensors
    need_dgate, need_dup = ctx.needs_input_grad
    call = torch.ops.tigon.swiglu_bwd if torch.compiler.is_compiling() else _bwd
    dgate, dup = call(dy, gate, up, need_dgate, need_dup)
    return dgate if need_dgate else None, dup if need_dup else None


_op = Op("swiglu", fake=_fake, setup_context=_setup_context, backward=_backward)


def _check(gate, up):
    if not gate.is_floating_point():
        raise Error(f"[swiglu] gate must be a float tensor, got {gate.dtype}")
    if up.dtype != gate.dtype:
        raise Error(f"[swiglu] up must be {gate.dtype}, got {up.dtype}")
    if up.shape != gate.shape:
        raise Error(f"[swiglu] up must be {list(gate.shape)}, got {list(up.shape)}")
    if up.device != gate.device:
        raise Error(f"[swiglu] up must be on {gate.device}, got {up.device}")


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gated activation ``silu(gate) * up`` with ``silu(x) = x / (1 + e^-x)``.

    Args:
        gate: ``[..., F]`` float32, bfloat16 or float16. Rows may lie apart in memory (gate and up as the
            halves of one ``[..., 2F]`` tensor are read where they are); any other layout is copied once.
            float64 runs the eager reference.
        up: shape, dtype and device of gate.

    Returns:
        ``[..., F]`` in the inputs' dtype, contiguous. Differentiable in both; arithmetic in float32, rounded
        once (plain ``F.silu(gate) * up`` rounds twice in 16 bits); bitwise deterministic. gate and up are
        kept for the backward by reference and never written.

    Raises:
        tigon.Error: shape, dtype or device does not fit.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", section 2.
    """
    _check(gate, up)
    if not has_kernel("swiglu", gate, up):
        return reference(gate, up)
    if gate.dim() == 0:
        return _op(gate.reshape(1), up.reshape(1)).reshape(())
    return _op(gate, up)
