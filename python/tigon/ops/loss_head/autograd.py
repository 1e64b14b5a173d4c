"""How a loss of the head returns its gradients.

Eager calls go through :class:`_Eager`, which takes nothing but the tensors that can need a gradient (host
cost); under ``torch.compile`` and the transforms of ``torch.func`` run other forms of the same formulas.
"""

from __future__ import annotations

import torch

from tigon._op import Op, direct_apply, graph_is_kept, once
from tigon.ops.loss_head import between, operators
from tigon.ops.loss_head.operands import MAY_ROUND, NEEDS
from tigon.ops.loss_head.operators import OP, Arguments, Call, call_of, flat

# The registered operator.


def _setup(ctx, call, output):
    hidden, weight, _, bias, *_ = call.operands
    of_bias = weight.dtype if bias is None else bias.dtype
    ctx.dtypes = (hidden.dtype, weight.dtype, of_bias, hidden.dtype, hidden.dtype)
    ctx.scalar, ctx.options = call.scalar, call.options
    _, *others = output
    ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)


def _setup_context(ctx, inputs, output):
    call = call_of(inputs)
    _setup(ctx, call, output)
    ctx.needs = call.needs
    _, *scale_and_gradients, _, _, _ = output
    ctx.save_for_backward(*(scale_and_gradients if call.scalar else _saved(call, output)))


def _saved(call, output):
    """What losses of rows save."""
    _, _, unit, *_, kept = output
    return between.saved(call, unit, kept, False)


def _backward(ctx, dloss, *_):
    if dloss is None:
        return _by_input((), 0, ())
    if ctx.scalar:
        _, of_weight, of_bias, *_ = ctx.dtypes
        gradients = operators.finish(dloss, *ctx.saved_tensors, of_weight, of_bias)
    else:
        gradients = between.gradients(ctx.saved_tensors, dloss, None, ctx.options, ctx.needs)
    return _by_input(gradients, ctx.needs, ctx.dtypes)


def _by_input(gradients, needs, dtypes):
    """For each argument of the operator its gradient, rounded, or None."""
    found = {
        name: g.to(dtype)
        for (name, bit), g, dtype in zip(NEEDS.items(), gradients, dtypes, strict=False)
        if needs & bit
    }
    return tuple(found.get(name) for name in Arguments._fields)


# For the transforms of torch.func: the backward computes the logits again, whatever the reduction. What needs
# a gradient is known there alone: inside vmap a tensor does not tell.


def _setup_transformed(ctx, inputs, output):
    call = call_of(inputs)
    _setup(ctx, call, output)
    _, scale, *_ = output
    ctx.save_for_backward(scale, *call.operands)


def _backward_transformed(ctx, dloss, *_):
    if dloss is None:
        return _by_input((), 0, ())
    scale, *operands = ctx.saved_tensors
    wanted = Arguments(*ctx.needs_input_grad)
    needs = sum(bit for name, bit in NEEDS.items() if getattr(wanted, name))
    upstream = _of_rows(dloss, scale, operands, ctx.scalar)
    gradients = between.gradients((None, None, *operands), upstream, None, ctx.options, needs)
    return _by_input(gradients, needs, ctx.dtypes)


def _of_rows(dloss, scale, operands, scalar):
    """The upstream gradient of each row's loss."""
    _, _, target, *_ = operands
    return (dloss * scale).expand(target.shape) if scalar else dloss


_op = Op(OP, fake=operators.fake, setup_context=_setup_context, backward=_backward,
         transformed=(_setup_transformed, _backward_transformed))  # fmt: skip


# Eager calls: what is done forward and backward. Each saves what its backward unpacks.


class _Scalar:
    """A scalar loss: the gradients exist when the loss does."""

    def forward(self, ctx, call):
        output = _op.forward(*flat(call))
        _, *scale_and_gradients, _, _, _ = output
        ctx.save_for_backward(*scale_and_gradients)
        return output

    def backward(self, ctx, dloss):
        finish = operators.finish if graph_is_kept() else operators.finish_in_place
        _, of_weight, of_bias, *_ = ctx.dtypes
        return finish(dloss, *ctx.saved_tensors, of_weight, of_bias)


class _Rows:
    """Losses of rows: what their backward starts from is kept, the rest is computed again."""

    def __init__(self, main_grad):
        self.main_grad = main_grad

    def forward(self, ctx, call):
        self.options = call.options
        output = _op.forward(*flat(call))
        ctx.save_for_backward(*_saved(call, output))
        return output

    def backward(self, ctx, dloss):
        return between.gradients(
            ctx.saved_tensors, dloss, None, self.options, ctx.needs, eager=True, main_grad=self.main_grad
        )


class _MainGrad:
    """A scalar loss alone; the backward adds weight's gradient to the tensor that its owner keeps."""

    def __init__(self, main_grad):
        self.main_grad = main_grad

    def forward(self, ctx, call):
        self.options = call.options
        output = _op.forward(*flat(call._replace(needs=0)))
        _, scale, *_ = output
        ctx.save_for_backward(scale, *call.operands)
        return output

    def backward(self, ctx, dloss):
        scale, *operands = ctx.saved_tensors
        upstream = _of_rows(dloss, scale, operands, True)
        return between.gradients(
            (None, None, *operands), upstream, None, self.options, ctx.needs, main_grad=self.main_grad
        )


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, call, hidden, weight, bias, lora_a, lora_b):
        ctx.way, ctx.needs = way, call.needs
        ctx.dtypes = tuple(
            hidden.dtype if t is None else t.dtype for t in (hidden, weight, bias, lora_a, lora_b)
        )
        loss, *_, way.rows, way.predicted, _ = way.forward(ctx, call)
        return loss

    @staticmethod
    @once(OP)
    def backward(ctx, dloss):
        gradients = ctx.way.backward(ctx, dloss)
        needs = ctx.needs
        wanted = (
            None if g is None or not needs & bit else g if g.dtype == dtype else g.to(dtype)
            for g, dtype, bit in zip(gradients, ctx.dtypes, NEEDS.values(), strict=True)
        )
        return None, None, *wanted


_apply = direct_apply(_Eager)


def run(call: Call, parameters, main_grad, keep_mb):
    """Loss, numbers of rows, predicted classes.

    Args:
        parameters: hidden, weight, bias, A, B as the caller gave them, whose gradients are asked for.
        main_grad: weight's gradient is added to it; ``None``: it is returned.
        keep_mb: as in :func:`tigon.linear_cross_entropy`.
    """
    if not call.scalar:
        needs, keep_rows = between.keep(call.operands, call.needs, keep_mb, main_grad)
        call = call._replace(needs=needs, keep_rows=keep_rows)
    if torch.compiler.is_compiling():
        loss, *_, rows, predicted, _ = _op.registered(*flat(call))
    elif torch._C._are_functorch_transforms_active():
        loss, *_, rows, predicted, _ = _op.transformed(*flat(call._replace(needs=0)))
    elif call.needs & ~MAY_ROUND == 0:
        loss, *_, rows, predicted, _ = _op.forward(*flat(call))
    else:
        way = _way(call, main_grad)
        loss = _apply(way, call, *parameters)
        rows, predicted = way.rows, way.predicted
    return loss, rows, predicted


def _way(call, main_grad):
    """How the gradients of an eager call are made."""
    if not call.scalar:
        return _Rows(main_grad)
    return _Scalar() if main_grad is None else _MainGrad(main_grad)
