"""Ops of one tensor of any shape that save it or their result (``csrc/tigon/base/activation.h``)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tigon._dtensor import Layout
from tigon._op import has_kernel, paired
from tigon.ops.arguments import check_float


def _fake(x):
    return x.new_empty(x.shape)


def activation(
    name: str, reference: Callable, *, elementwise: bool = True
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The differentiable call of ``tigon::<name>``; `reference` where there is no kernel.

    Args:
        elementwise: every element by itself; else every row.
    """
    op = paired(name, _fake, layout=Layout(rows=1, elementwise=elementwise))

    def call(x):
        check_float(name, "x", x)
        if not has_kernel(name, x):
            return reference(x)
        if x.dim() == 0:
            return op(x.reshape(1)).reshape(())
        return op(x)

    return call
