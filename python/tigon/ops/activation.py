"""Ops of one tensor of any shape that save it for the backward (``csrc/tigon/base/activation.h``)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tigon._dtensor import Layout
from tigon._op import Op, has_kernel, raw
from tigon.ops.arguments import check_float


def _fake(x):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def activation(name: str, reference: Callable) -> Callable[[torch.Tensor], torch.Tensor]:
    """The differentiable call of ``tigon::<name>``; `reference` where there is no kernel."""
    bwd = raw(f"{name}_bwd", lambda dy, x: _fake(x))

    def backward(ctx, dy):
        if dy is None:
            return None
        (x,) = ctx.saved_tensors
        return bwd(dy, x)

    op = Op(
        name,
        fake=_fake,
        setup_context=_setup_context,
        backward=backward,
        layout=Layout(rows=1, elementwise=True),
    )

    def call(x):
        check_float(name, "x", x)
        if not has_kernel(name, x):
            return reference(x)
        if x.dim() == 0:
            return op(x.reshape(1)).reshape(())
        return op(x)

    return call
