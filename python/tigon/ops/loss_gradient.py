"""Losses of rows with one gradient, and when it is formed: one place for the routes that they share.

A scalar loss forms its gradient in the forward pass, beside the loss; one loss a row keeps the inputs, and
its backward computes from them, as often as called.
"""

from __future__ import annotations

import math

import torch

from tigon._op import Op, direct_apply, graph_is_kept, is_batched, raw, refuse_second, transformable
from tigon.error import refuse

NONE = 0  # the reduction that is none, in the schemas

rescale = raw("cross_entropy_rescale", lambda grad, factor: None)


class RowLoss:
    """The operators ``tigon::<name>``, ``<name>_in_place`` and ``<name>_bwd`` as one differentiable loss.

    Their inputs are three tensors (the first one ``[..., V]``, differentiable), maybe others, the reduction,
    and options, which the backward is told.

    Args:
        name: of the operators, and in messages.
        reduction: the reduction's place among the inputs.
    """

    def __init__(self, name: str, reduction: int) -> None:
        self.name, self.reduction = name, reduction
        self.op = Op(name, fake=self._fake, setup_context=self._setup_context, backward=self._backward_traced,
                     transformed=(self._setup_transformed, self._backward_transformed))  # fmt: skip
        self.forward_in_place = raw(f"{name}_in_place", lambda x, *_: x.new_empty((), dtype=torch.float32),
                                    name)  # fmt: skip
        self.backward = raw(f"{name}_bwd", lambda dloss, x, *_: x.new_empty(x.shape))
        self.rescaled = transformable(name, f"{name}_rescaled", lambda dx, dloss, x: _product(dx, dloss),
                                      lambda *_: None, lambda *_: refuse_second(name))  # fmt: skip

    def __call__(self, *inputs, inplace: bool) -> torch.Tensor:
        """The loss; ``inplace``: a scalar's gradient may take the place of the first input."""
        scalar = inputs[self.reduction] != NONE
        need_grad = torch.is_grad_enabled() and inputs[0].requires_grad
        if torch.compiler.is_compiling():
            return self.op.registered(*inputs, need_grad and scalar)[0]
        if torch._C._are_functorch_transforms_active():  # inside vmap a tensor does not tell what it needs
            return self.op.transformed(*inputs, scalar)[0]
        if need_grad:
            return _apply(self, inplace, *inputs)
        return self.op.forward(*inputs, False)[0]

    def _fake(self, *inputs):
        x, need_gradient = inputs[0], inputs[-1]
        rows = (math.prod(x.shape[:-1]),) if inputs[self.reduction] == NONE else ()
        return x.new_empty(rows, dtype=torch.float32), x.new_empty(x.shape if need_gradient else (0,))

    # Traced by torch.compile. Everything functional and repeatable.

    def _setup_context(self, ctx, inputs, output):
        ctx.scalar, ctx.options = inputs[self.reduction] != NONE, inputs[self.reduction + 1 : -1]
        ctx.inputs = len(inputs)
        ctx.save_for_backward(*((output[1],) if ctx.scalar else inputs[:3]))
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def _backward_traced(self, ctx, dloss, _=None):
        if dloss is None:
            dx = None
        elif ctx.scalar:
            dx = _product(*ctx.saved_tensors, dloss)
        else:
            dx = self.backward(dloss, *ctx.saved_tensors, *ctx.options)
        return dx, *(None,) * (ctx.inputs - 1)

    # The transforms of torch.func: the inputs are kept too, so that a second derivative arrives at a refusal.

    def _setup_transformed(self, ctx, inputs, output):
        self._setup_context(ctx, inputs, output)
        if ctx.scalar:
            ctx.save_for_backward(output[1], inputs[0])

    def _backward_transformed(self, ctx, dloss, _=None):
        if any(ctx.needs_input_grad[1:]):
            refuse(self.name, "only the first tensor gets a gradient, asked for another's")
        if dloss is None or not ctx.scalar:
            return self._backward_traced(ctx, dloss)
        dx, x = ctx.saved_tensors
        return self.rescaled(dx, dloss, x), *(None,) * (ctx.inputs - 1)


def scaled(formed: torch.Tensor, dloss: torch.Tensor) -> torch.Tensor:
    """The gradient formed in the forward times the upstream one: in its own memory, or in a copy of it where
    another backward may follow."""
    if is_batched():
        return _product(formed, dloss)
    if graph_is_kept():
        formed = formed.clone()
    rescale(formed, dloss)
    return formed


def _product(dx, dloss):
    """The gradient times the upstream one, in operations that a compiler may fuse; one rounding."""
    return (dx.float() * dloss).to(dx.dtype)


class _Eager(torch.autograd.Function):
    """Eager with a gradient: a scalar loss hands the very buffer out that its forward has filled.

    A backward that keeps its graph hands out a copy, so that another may follow.
    """

    @staticmethod
    def forward(ctx, loss, inplace, *inputs):
        x, options = inputs[0], inputs[loss.reduction + 1 :]
        ctx.loss, ctx.inputs, ctx.options = loss, len(inputs), options
        ctx.scalar = inputs[loss.reduction] != NONE
        if not ctx.scalar:
            ctx.save_for_backward(*inputs[:3])
            return loss.op.forward(*inputs, False)[0]
        if inplace:
            value, dx = loss.forward_in_place(*inputs), x.detach()
            torch.autograd.graph.increment_version(dx)  # whoever saved x is told
        else:
            value, dx = loss.op.forward(*inputs, True)
        ctx.save_for_backward(dx)
        return value

    @staticmethod
    def backward(ctx, dloss):
        if torch.is_grad_enabled():
            refuse_second(ctx.loss.name)
        if ctx.scalar:
            dx = scaled(*ctx.saved_tensors, dloss)
        else:
            dx = ctx.loss.backward(dloss, *ctx.saved_tensors, *ctx.options)
        return None, None, dx, *(None,) * (ctx.inputs - 1)


_apply = direct_apply(_Eager)
