"""Losses of rows with one gradient, and when it is formed: one place for the routes that they share.

A scalar loss forms its gradient in the forward pass, with the loss; one loss a row keeps the inputs, and
its backward computes from them, as often as called.
"""

from __future__ import annotations

import math

import torch

from tigon import _op
from tigon._dtensor import PLAIN
from tigon.error import refuse

NONE = 0  # the reduction that is none, in the schemas

rescale = _op.raw("cross_entropy_rescale", lambda grad, factor: None)


class RowLoss:
    """The operators ``tigon::<name>``, ``<name>_in_place`` and ``<name>_bwd`` as one differentiable loss.

    Their inputs are three tensors (the first one ``[..., V]``, differentiable), maybe others, the reduction,
    and options, which the backward gets.

    Args:
        name: of the operators, and in messages.
        reduction: the reduction's place among the inputs.
    """

    def __init__(self, name: str, reduction: int) -> None:
        self.name, self.reduction = name, reduction
        transformed = (self._setup_transformed, self._backward_transformed)
        self.op = _op.Op(
            name,
            fake=self._fake,
            setup_context=self._setup_context,
            backward=self._backward,
            results=1,
            transformed=transformed,
        )
        in_place = _op.raw(f"{name}_in_place", lambda x, *_: x.new_empty((), dtype=torch.float32), name)
        self.gradient = _op.raw(f"{name}_bwd", lambda dloss, x, *_: x.new_empty(x.shape))
        self.rescaled = _op.transformable(
            name,
            f"{name}_rescaled",
            lambda dx, dloss, x: _product(dx, dloss),
            lambda *_: None,
            lambda *_: _op.refuse_second(name),
        )

        def forward(ctx, *inputs):
            loss, dx = in_place(*inputs[:-1]), inputs[0].detach()
            torch.autograd.graph.increment_version(dx)  # whoever saved x is told
            self._setup_context(ctx, inputs, (loss, dx))
            return loss

        members = {"forward": staticmethod(forward), "backward": staticmethod(_op.once(name)(self._backward))}
        function = type(f"Tigon_{name}_in_place", (torch.autograd.Function,), members)
        self.apply_in_place = _op.direct_apply(function)

    def __call__(self, *inputs, inplace: bool) -> torch.Tensor:
        """The loss; ``inplace``: a scalar's gradient may take the place of the first input."""
        scalar = inputs[self.reduction] != NONE
        # Inside vmap a tensor does not tell what it needs.
        transformed = not torch.compiler.is_compiling() and _op.is_transformed()
        wanted = scalar and (transformed or (torch.is_grad_enabled() and inputs[0].requires_grad))
        if inplace and wanted and not transformed and not torch.compiler.is_compiling():
            return self.apply_in_place(*inputs, True)
        return self.op(*inputs, wanted)

    def _fake(self, *inputs):
        x, need_gradient = inputs[0], inputs[-1]
        rows = (math.prod(x.shape[:-1]),) if inputs[self.reduction] == NONE else ()
        return x.new_empty(rows, dtype=torch.float32), x.new_empty(x.shape if need_gradient else (0,))

    def _setup_context(self, ctx, inputs, output):
        ctx.scalar, ctx.options = inputs[self.reduction] != NONE, inputs[self.reduction + 1 : -1]
        ctx.inputs = len(inputs)
        ctx.save_for_backward(*((output[1],) if ctx.scalar else inputs[:3]))
        ctx.set_materialize_grads(False)

    def _backward(self, ctx, dloss, _=None):
        if dloss is None:
            dx = None
        elif ctx.scalar:
            dx = scaled(*ctx.saved_tensors, dloss)
        else:
            dx = self.gradient(dloss, *ctx.saved_tensors, *ctx.options)
        return dx, *(None,) * (ctx.inputs - 1)

    # The transforms of torch.func: the inputs are kept too, so that a second derivative arrives at a refusal.

    def _setup_transformed(self, ctx, inputs, output):
        self._setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])
        if ctx.scalar:
            ctx.save_for_backward(output[1], inputs[0])

    def _backward_transformed(self, ctx, dloss, _=None):
        if any(ctx.needs_input_grad[1:]):
            refuse(self.name, "only the first tensor gets a gradient, asked for another's")
        if dloss is None or not ctx.scalar:
            return self._backward(ctx, dloss)
        dx, x = ctx.saved_tensors
        return self.rescaled(dx, dloss, x), *(None,) * (ctx.inputs - 1)


def scaled(gradient: torch.Tensor, dloss: torch.Tensor) -> torch.Tensor:
    """The gradient formed in the forward times the upstream one: in its own memory, or in a copy of it if
    another backward may follow; for a compiler and for batches an operation that repeats."""
    if type(gradient) not in PLAIN or _op.is_compiling() or _op.is_batched():  # see may_overwrite_saved
        return _product(gradient, dloss)
    if _op.graph_is_kept():
        gradient = gradient.clone()
    rescale(gradient, dloss)
    return gradient


def _product(dx, dloss):
    """The gradient times the upstream one, in operations that a compiler may fuse; one rounding."""
    return (dx.float() * dloss).to(dx.dtype)
