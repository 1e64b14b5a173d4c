"""Ops of one tensor of any shape that save it or their result (``csrc/tigon/base/activation.h``)."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tigon._dtensor import Layout
from tigon._op import has_kernel, paired
from tigon.ops.arguments import check_float


def _fake(x):
    return x.new_empty(x.shape)


def activation(reference: Callable, *, elementwise: bool = True) -> Callable[[Callable], Callable]:
    """Makes a function without a body the call of its operator, or of `reference` if there is no kernel.

    Args:
        elementwise: every element by itself; else every row.
    """

    def decorate(function):
        name = function.__name__
        op = paired(name, _fake, layout=Layout(rows=1, elementwise=elementwise))

        @functools.wraps(function)
        def call(x):
            check_float(name, "x", x)
            if not has_kernel(name, x=x):
                return reference(x)
            if x.dim() == 0:
                return op(x.reshape(1)).reshape(())
            return op(x)

        return call

    return decorate
