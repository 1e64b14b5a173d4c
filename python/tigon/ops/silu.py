"""SiLU (Elfwing et al. 2017; Hendrycks & Gimpel 2016). Contract: ``tigon/ops/silu/silu.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon._op import Op, has_kernel, raw
from tigon.ops.arguments import check_float


def reference(x):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    return F.silu(x)


def _fake(x):
    return x.new_empty(x.shape)


def _fake_bwd(dy, x):
    return x.new_empty(x.shape)


_bwd = raw("silu_bwd", _fake_bwd)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy):
    if dy is None:
        return None
    (x,) = ctx.saved_tensors
    return _bwd(dy, x)


_op = Op("silu", fake=_fake, setup_context=_setup_context, backward=_backward)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Activation ``x * sigmoid(x)``; for ``silu(gate) * up`` see :func:`tigon.swiglu`.

    Args:
        x: any shape, float32, bfloat16 or float16. Rows may lie apart in memory; any other layout is copied
            once. float64 runs the eager reference.

    Returns:
        x's shape and dtype, contiguous. Differentiable, ``dx = dy * s * (1 + x * (1 - s))`` with
        ``s = sigmoid(x)``; arithmetic in float32, rounded once; bitwise deterministic. x is kept for the
        backward by reference and never written.

    Raises:
        tigon.Error: x is no float tensor.

    Source: Elfwing et al. 2017, "Sigmoid-Weighted Linear Units for Neural Network Function Approximation in
    Reinforcement Learning", arXiv:1702.03118, equation 5.
    """
    check_float("silu", "x", x)
    if not has_kernel("silu", x):
        return reference(x)
    if x.dim() == 0:
        return _op(x.reshape(1)).reshape(())
    return _op(x)
