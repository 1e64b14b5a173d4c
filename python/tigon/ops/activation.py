"""Ops of one tensor of any shape that save it or their result (``csrc/tigon/base/activation.h``)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tigon._dtensor import Layout
from tigon._op import Op, has_kernel, raw
from tigon.ops.arguments import check_float


def _fake(x):
    return x.new_empty(x.shape)


def activation(
    name: str, reference: Callable, *, saves_result: bool = False, elementwise: bool = True
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The differentiable call of ``tigon::<name>``; `reference` where there is no kernel.

    Args:
        saves_result: the backward takes the result in place of x (``csrc/tigon/base/distribution.h``).
        elementwise: every element by itself; else every row.
    """
    bwd = raw(f"{name}_bwd", lambda dy, saved: _fake(saved))

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*([output] if saves_result else inputs))
        ctx.set_materialize_grads(False)

    def backward(ctx, dy):
        return None if dy is None else bwd(dy, *ctx.saved_tensors)

    op = Op(
        name,
        fake=_fake,
        setup_context=setup_context,
        backward=backward,
        layout=Layout(rows=1, elementwise=elementwise),
    )

    def call(x):
        check_float(name, "x", x)
        if not has_kernel(name, x):
            return reference(x)
        if x.dim() == 0:
            return op(x.reshape(1)).reshape(())
        return op(x)

    return call
