"""Squared ReLU (So et al. 2021, "Primer"). Contract: ``tigon/ops/relu_squared/relu_squared.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon._op import Op, has_kernel, raw
from tigon.ops.arguments import check_float


def reference(x):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    return F.relu(x).square()


def _fake(x):
    return x.new_empty(x.shape)


def _fake_bwd(dy, x):
    return x.new_empty(x.shape)


_bwd = raw("relu_squared_bwd", _fake_bwd)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy):
    if dy is None:
        return None
    (x,) = ctx.saved_tensors
    return _bwd(dy, x)


_op = Op("relu_squared", fake=_fake, setup_context=_setup_context, backward=_backward)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Activation ``relu(x)^2``.

    Args:
        x: ``[..., F]`` float32, bfloat16 or float16. Rows may lie apart in memory; any other layout is copied
            once. float64 runs the eager reference.

    Returns:
        ``[..., F]`` in x's dtype, contiguous. Differentiable, ``dx = 2 * relu(x) * dy``; arithmetic in
        float32, rounded once; bitwise deterministic. x is kept for the backward by reference and never
        written.

    Raises:
        tigon.Error: x is no float tensor.

    Source: So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling",
    arXiv:2109.08668.
    """
    check_float("relu_squared", "x", x)
    if not has_kernel("relu_squared", x):
        return reference(x)
    if x.dim() == 0:
        return _op(x.reshape(1)).reshape(())
    return _op(x)
