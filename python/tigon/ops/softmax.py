"""Softmax (Bridle 1990). Contract: ``csrc/tigon/ops/softmax/softmax.h``."""

from __future__ import annotations

import torch

from tigon._dtensor import Layout
from tigon._op import Op, has_kernel, raw
from tigon.ops.arguments import check_float


def reference(x):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    return torch.softmax(x, -1, torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def _fake(x):
    return x.new_empty(x.shape)


def _fake_bwd(dy, y):
    return y.new_empty(y.shape)


_bwd = raw("softmax_bwd", _fake_bwd)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy):
    if dy is None:
        return None
    (y,) = ctx.saved_tensors
    return _bwd(dy, y)


_op = Op("softmax", fake=_fake, setup_context=_setup_context, backward=_backward, layout=Layout(rows=1))


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, ``exp(x) / sum(exp(x))``.

    Args:
        x: ``[..., C]`` float32, bfloat16 or float16, any leading strides (rows dense, or copied once).
            float64 runs the eager reference.

    Returns:
        ``[..., C]`` in x's dtype, contiguous. Differentiable (the result is kept for the backward);
        arithmetic in float32, rounded once; bitwise deterministic. Entries of ``-inf`` give 0; a row of
        nothing else is NaN. In 16 bits the backward starts from the rounded result, as that of
        :func:`torch.softmax` in that dtype: of sharp rows it may keep no digit (float16, logits of size 100:
        off by 1.7e-4 at 1.1e-4), where a softmax in float32 that is rounded afterwards keeps them all.

    Raises:
        tigon.Error: x is no float tensor.

    Source: Bridle 1990, "Probabilistic interpretation of feedforward classification network outputs".
    """
    check_float("softmax", "x", x)
    if not has_kernel("softmax", x):
        return reference(x)
    if x.dim() == 0:
        return _op(x.reshape(1)).reshape(())
    return _op(x)
